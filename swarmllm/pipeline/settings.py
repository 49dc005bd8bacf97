"""Settings of a node's pipelines; the defaults are the daemon's."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmllm.pipeline.prefix.choice import PrefixFetchSettings
from swarmllm.pipeline.route.row_formats import Compression
from swarmllm.pipeline.vision.compression import PictureCompression
from swarmllm.scheduling.constraints import Constraints


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    prefill_chunk_tokens: int = 128
    """Prompt tokens per walk."""
    ack_timeout_s: float = 10.0
    """Within which every stage must have accepted its assignment."""
    silence_timeout_s: float = 120.0
    """Longest wait for the next sign of a request: of a token at the origin, of a job at a stage."""
    failover_timeout_s: float = 60.0
    """How long a stream whose pipeline broke may look for another one; 0: it ends."""
    hedge: float = 0.05
    """The part of the work of this node's requests that may be done again by standbys; 0: none is started."""
    constraints: Constraints = field(default_factory=Constraints)
    """What no route may do."""
    shares_prefixes: bool = True
    """Stages are told names of what they compute, so that they need not compute it again."""
    prefix_fetch: PrefixFetchSettings = field(default_factory=PrefixFetchSettings)
    """Whether KV of prompts' beginnings is fetched from other nodes and given to them."""
    local_embedding_privacy: bool = False
    """No prompt leaves as token ids: a node that runs the whole model gets rows, too."""
    guesses: bool = False
    """This node's workers guess tokens of models that are cut. The daemon's default is another one."""
    tells_prompt: bool = False
    """The last of several stages is told the prompt's token ids, so that it guesses from them. The daemon's
    default is another one."""
    check_rate: float = 0.0
    """The part of the requests of fully trusted nodes whose results are computed again (strangers: four times
    as many); 0: none. The daemon's default is another one."""
    activation_compression: Compression = "off"
    """How rows may travel between stages. The daemon's default is another one."""
    picture_compression: PictureCompression = "off"
    """Whether pictures and their rows may travel in fewer bytes. The daemon's default is another one."""
    n_ctx: int = 4096
    """KV cells per model: prompt and output of one request must fit."""
    exact: bool = False
    """All requests of this node's clients are exact, whatever they say."""
    max_stage_requests: int = 64
    """Requests of other nodes in which this node may take part at the same time."""
    max_requests_per_model: int = 8
    """The same per model; no more than its worker has slots."""
