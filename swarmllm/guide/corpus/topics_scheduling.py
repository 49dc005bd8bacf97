"""Routes, placement, admission, privacy."""

# One question, one answer and one list per line reads better here than any wrapping.
# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from .topic import Topic

TOPICS: tuple[Topic, ...] = (
    Topic(
        "route", "routes",
        "A route says which node runs which layers for one request. It is reported to the client in the x-swarm-route header.",
        "A route says which node runs which layers.",
        terms=("a route", "the x-swarm-route header"),
        asks=("how do i see which nodes [answered|ran my request]?", "which header shows the route?"),
    ),
    Topic(
        "parallax", "Parallax routing",
        "Parallax routing finds the fastest route by dynamic programming over layer boundaries and holders. It uses measured layer latencies, load and the network latency of each hop.",
        "Parallax routing finds the fastest route by dynamic programming.",
        terms=("parallax", "parallax routing", "the parallax scheduler"),
        asks=("how is the route [chosen|found|computed]?", "how does [the scheduler|swarmllm] [choose|pick|find] [the nodes|a route|the fastest route]?", "how are nodes [chosen|picked|selected] for a request?",
              "by what method is the best route found?"),
        why="A greedy choice by latency alone misses that fewer hops can beat faster layers.",
    ),
    Topic(
        "placement", "placement",
        "Placement decides which node hosts which layers. Every node computes it from the same gossiped state, so no leader is needed.",
        "Placement decides who hosts which layers.",
        terms=("placement", "layer placement"),
        asks=("who decides [which node hosts|where] [which |the ]layers[| go]?", "how are layers [distributed|spread|divided] over the nodes?", "is there a [leader|central server|master|coordinator]?",
              "which node gets which layers?"),
    ),
    Topic(
        "water_filling", "water-filling",
        "Water-filling divides the layers of a pipeline among its nodes in proportion to their speed, but gives no node more than its memory can hold.",
        "Water-filling divides layers by speed, within memory.",
        terms=("water-filling", "water filling"),
        asks=("how many layers does each node get?",),
    ),
    Topic(
        "auto_shard", "the AutoShardManager",
        "The AutoShardManager turns the target placement into actions, softly: a shard moves only after it has wanted to move for three ticks in a row.",
        "The AutoShardManager moves shards towards the target placement.",
        terms=("the autoshardmanager", "the auto shard manager"),
        asks=("how are shards moved to other nodes?",),
        why="Otherwise every small change would reshuffle the whole swarm.",
    ),
    Topic(
        "latency_ema", "observed latencies",
        "Each node measures how long its layers take and keeps a moving average. The top 32 observations are gossiped, so that every node can plan routes.",
        "Nodes gossip a moving average of their layer latencies.",
        terms=("the observed latencies", "the latency ema"),
        asks=("how does a node know how fast its peers are?", "how is the speed of a [node|peer] measured?"),
    ),
    Topic(
        "affinity", "pipeline affinity",
        "With pipeline affinity a session keeps its previous pipeline as long as all of its nodes are connected, because they still have its KV cache.",
        "A session keeps its pipeline to reuse the KV cache.",
        terms=("affinity", "pipeline affinity"),
        asks=("why does a session [stay|keep] [on|with|] the same nodes?",),
    ),
    Topic(
        "admission", "admission",
        "Admission decides whether a request runs now, waits in a queue or is refused with status 429 and a Retry-After header.",
        "Admission lets a request run, wait or be refused.",
        terms=("admission", "admission control"),
        asks=("what happens [when|if] there are too many requests?", "how are requests [queued|throttled|limited]?", "why do i get [429|status 429|a 429]?", "what happens under too much load?"),
    ),
    Topic(
        "tiers", "tiers",
        "Tiers limit how many requests of a user run at once: Bronze a quarter of the limit, Silver half, Gold all of it and Platinum twice as many.",
        "Bronze 1/4, Silver 1/2, Gold 1x, Platinum 2x.",
        terms=("tiers", "a tier", "the bronze tier", "the gold tier", "the silver tier", "the platinum tier"),
        asks=("which tiers [are there|exist]?", "how many requests may [bronze|gold|silver|platinum] run?"),
    ),
    Topic(
        "retry", "retries",
        "After a transient failure of a remote node the request is tried once more with a fresh route over the nodes that are alive now.",
        "A failed request is tried once more on a new route.",
        terms=("a retry",),
        asks=("is a failed request [retried|tried again]?", "how often is a request retried?", "does it retry[| a request][| after a failure]?", "will a failed request be repeated?"),
    ),
    Topic(
        "local_route", "the local route",
        "The local route runs the whole model on the node that received the request. It is always a candidate: a slower split is not chosen.",
        "The local route runs the whole model at home.",
        terms=("the local route", "a local route"),
        asks=("when does a request stay on my node?",),
    ),
    Topic(
        "remote_generate", "remote-generate",
        "Remote-generate means that one peer holds the whole model: it runs the complete decode loop there and streams the tokens back to the origin.",
        "One peer runs the whole decode loop and streams tokens.",
        terms=("remote-generate", "remote generate"),
        asks=("what happens when one peer has the whole model?",),
        why="The distance to the peer is then paid once, and not for every token.",
    ),
    Topic(
        "chain", "the chain",
        "A chain is a pipeline of several stages. The last stage samples, and the token goes to the origin and straight to the first stage.",
        "A chain is a pipeline of several stages.",
        terms=("a chain", "the chain", "pipeline chaining"),
        asks=("what is the shape with several stages called?",),
        why="So the distance of the origin is not paid for each token.",
    ),
    Topic(
        "shapes", "the shapes of a pipeline",
        "A request can walk in three shapes: local or remote-generate with one stage, a chain of several stages, or a boomerang that starts and ends at the origin.",
        "Local or remote-generate, chain, and boomerang.",
        terms=("the pipeline shapes",),
        asks=("[which|what] [shapes|kinds|types] of [pipelines|routes] [are there|exist]?", "how many [shapes|kinds] of pipelines are there?", "what are the three shapes?", "name the shapes of a pipeline"),
    ),
    Topic(
        "boomerang", "the boomerang",
        "In a boomerang, or encrypted pipeline, the origin runs the first and the last segment itself. The peers in between see hidden states only.",
        "In a boomerang the origin runs the first and last segment.",
        terms=("boomerang", "a boomerang", "the boomerang pipeline", "an encrypted pipeline", "the encrypted pipeline"),
        asks=("how can i hide my prompt from [peers|the other nodes]?", "what does boomerang mean?", "how do i keep my prompts and answers private?"),
        why="Anyone who runs the embedding or the head can read the text, so the origin keeps both.",
    ),
    Topic(
        "local_embedding", "local embedding privacy",
        "With local embedding privacy the origin turns the prompt into vectors itself and sends those, so peers never see the token ids of the prompt.",
        "The origin embeds the prompt itself and hides its token ids.",
        terms=("local embedding privacy", "local_embedding_privacy", "local embedding"),
        asks=("what is the light form of the encrypted pipeline?", "what is the difference between boomerang and local embedding privacy?"),
    ),
    Topic(
        "privacy", "privacy",
        "A peer that runs the embedding or the head could read your text. Use the boomerang pipeline, or local embedding privacy, to keep the text on your own node.",
        "Use a boomerang to keep the text on your node.",
        terms=("privacy",),
        asks=("can [peers|others|other nodes|other people|strangers] [see|read] my [prompt|prompts|messages|text|questions]?", "is my [prompt|data|text|chat] private?", "who can [see|read] my [prompt|prompts|messages|text]?",
              "do [peers|other nodes] [see|know] what i [ask|write]?", "[is|are] my [prompts|messages] [visible|readable] [to|for] [others|peers]?"),
        more="Prompt text is never written to the logs, and a job never carries it.",
    ),
    Topic(
        "activation_compression", "activation compression",
        "Activation compression sends hidden states as Q8_0 instead of f32, which makes them about 3.76 times smaller on the wire.",
        "Activations are sent as Q8_0, about 3.76 times smaller.",
        terms=("activation compression",),
        asks=("how can i save network bandwidth?",),
    ),
    Topic(
        "activation_size", "the size of activations",
        "For a model with a hidden size of 3584 one token needs about 14 KB per hop as f32.",
        "About 14 KB per token for a hidden size of 3584.",
        terms=("the size of an activation",),
        asks=("how [much|many] [data|bytes] [is|are] sent per token?", "how much [bandwidth|traffic|network traffic] does [a pipeline|it|a token] need?", "how large are [the |]activations?", "what amount of data goes over a hop?"),
    ),
)
