"""The kinds of functions in the corpus: how each may be called, asked for, answered and reported."""

# One list per line reads better here than any wrapping.
# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .slots import city, invented, layer_range, number, person
from .talk import SUBJECT_TOPICS, bare

Values = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A kind of function: how it may be called, asked for, answered and reported.

    `parameters` are (role, JSON type, possible names). `asks` and `reports` have `{role}` slots; `results` makes the
    values that the function returns.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[str, str, tuple[str, ...]], ...]
    asks: tuple[str, ...]
    heldout_asks: tuple[str, ...]
    values: Callable[[random.Random, bool], Values]
    result: Callable[[random.Random, Values], Values]
    report: str


def _peers(rng: random.Random, _: Values) -> Values:
    names = [invented(rng).lower() for _ in range(rng.randrange(1, 4))]
    told = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return {"peers": names, "told": told}


def _sum(_: random.Random, values: Values) -> Values:
    return {"result": values["a"] + values["b"]}


def _layers(rng: random.Random, heldout: bool) -> Values:
    start, end = layer_range(rng, heldout)
    name = rng.choice(
        (
            "guide",
            "qwen",
            "llama",
            "mistral",
            "gemma",
            invented(rng).lower(),
            invented(rng).lower() + f"-{rng.randrange(1, 80)}b",
        )
    )
    return {"name": name, "layers": f"{start}:{end}", "start": start, "end": end}


def _zone(rng: random.Random, heldout: bool) -> Values:
    region = rng.choice(("Europe", "America", "Asia", "Africa", "Australia", "Pacific"))
    return {"zone": f"{region}/{city(rng, heldout).title().replace(' ', '_')}"}


def _query(rng: random.Random, heldout: bool) -> Values:
    terms = [bare(rng.choice(topic.terms)) for topic in rng.sample([t for t in SUBJECT_TOPICS if t.terms], 2)]
    if heldout:
        return {"query": " with ".join(terms)}
    return {
        "query": rng.choice(
            (
                terms[0],
                terms[0],
                " and ".join(terms),
                f"{terms[0]} {terms[1]}",
                invented(rng).lower(),
                f"{invented(rng).lower()} {terms[0]}",
            )
        )
    }


_SKY = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy", "stormy")

SHAPES: tuple[Shape, ...] = (
    Shape(
        ("get_weather", "get_weather", "get_current_weather", "weather", "fetch_weather"),
        ("Get the weather of a city", "Get the current weather", "Current weather for a place", "Weather report"),
        (("city", "string", ("city", "city", "location", "place")),),
        ("what is the weather[| like] in {city}?", "how is the weather in {city}?", "weather in {city}", "is it [raining|sunny|cold|warm] in {city}?", "tell me the weather in {city}", "what's the weather in {city}[| today| now]?", "how [cold|warm|hot] is it in {city}?",
         "do i need an umbrella in {city}?", "get the weather for {city}", "{city} weather", "what is the temperature in {city}?", "i am in {city}. how is the weather?", "check the weather in {city}[| please]"),
        ("could you look up the weather in {city}?", "what weather do they have in {city}?", "i travel to {city}, how is the weather there?"),
        lambda rng, heldout: {"city": city(rng, heldout)},
        lambda rng, _: {"temperature": rng.randrange(-15, 40), "condition": rng.choice(_SKY)},
        "It is {temperature} degrees and {condition} in {city}.",
    ),
    Shape(
        ("get_time", "get_time", "current_time", "get_current_time", "clock"),
        ("Get the time of a timezone", "Current time in a timezone", "Tells the time"),
        (("zone", "string", ("timezone", "timezone", "tz", "zone")),),
        ("what time is it in {zone}?", "what is the time in {zone}?", "time in {zone}", "tell me the time in {zone}", "how late is it in {zone}?", "current time {zone}", "get the time for {zone}", "which time is it in {zone}[| now]?", "what's the time in {zone}?"),
        ("could you give me the time in {zone}?", "what does the clock say in {zone}?"),
        _zone,
        lambda rng, _: {"time": f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"},
        "It is {time} in {zone}.",
    ),
    Shape(
        ("load_model", "load_model", "load_layers", "model_load"),
        ("Load layers of a model", "Load a layer range of a model on this node", "Load a model"),
        (("name", "string", ("name", "name", "model")), ("layers", "string", ("layers", "layers", "layer_range", "range"))),
        ("load layers {layers} of {name}", "load the layers {start} to {end} of {name}", "load {name} layers {layers}", "please load layers {start} to {end} of the model {name}", "can you load layers {layers} of {name}?", "load {name} with layers {layers}", "i want layers {start} to {end} of {name}",
         "load the layer range {layers} of {name}", "load {name} {layers}", "load layers {start} - {end} of {name}"),
        ("could you load the layers {layers} of {name}?", "this node should load layers {start} to {end} of {name}"),
        _layers,
        lambda rng, _: {"status": rng.choice(("ok", "loaded", "done"))},
        "The layers {layers} of {name} are loaded.",
    ),
    Shape(
        ("list_peers", "list_peers", "get_peers", "peers"),
        ("List the connected peers", "List all peers of this node", "Peers of the swarm"),
        (),
        ("which peers are connected?", "list [the|my|all] peers", "who is connected?", "show me the peers", "how many peers do i have?", "what are my peers?", "are there any peers?", "which nodes are connected?", "get the list of peers"),
        ("could you list the connected peers?", "who are my peers?"),
        lambda rng, heldout: {},
        _peers,
        "The connected peers are: {told}.",
    ),
    Shape(
        ("add", "add", "sum", "add_numbers", "calculator"),
        ("Add two numbers", "Adds a and b", "Sum of two numbers"),
        (("a", "integer", ("a", "a", "x")), ("b", "integer", ("b", "b", "y"))),
        ("what is {a} plus {b}?", "add {a} and {b}", "{a} + {b}", "what is {a} + {b}?", "how much is {a} plus {b}?", "what is the sum of {a} and {b}?", "compute {a} + {b}", "calculate {a} plus {b}", "please add {a} and {b}", "{a} plus {b}"),
        ("could you add {a} and {b} for me?", "what do you get for {a} plus {b}?"),
        lambda rng, heldout: {"a": number(rng, heldout), "b": number(rng, heldout)},
        _sum,
        "{a} plus {b} is {result}.",
    ),
    Shape(
        ("search_docs", "search_docs", "search", "find_in_docs"),
        ("Search the documentation", "Search the docs for a query", "Full text search"),
        (("query", "string", ("query", "query", "q", "text")),),
        ("search the docs for {query}", "search for {query}", "look up {query} in the docs", "find {query} in the documentation", "what do the docs say about {query}?", "search the documentation for {query}", "please search {query}", "docs search: {query}", "find {query}"),
        ("could you search the documentation for {query}?", "please look in the docs for {query}"),
        _query,
        lambda rng, _: {"text": rng.choice(SUBJECT_TOPICS).short},
        "I found this: {text}",
    ),
    Shape(
        ("find_user", "get_user", "lookup_person", "get_contact"),
        ("Find a person", "Get the email of a user", "Look up a contact"),
        (("name", "string", ("name", "user", "person")),),
        ("find the user {name}", "what is the email of {name}?", "look up {name}", "get the contact of {name}", "who is the user {name}?", "give me the email of {name}"),
        ("could you find the user {name}?",),
        lambda rng, heldout: {"name": person(rng, heldout)},
        lambda rng, values: {"email": f"{invented(rng).lower()}@{invented(rng).lower()}.{rng.choice(('org', 'com', 'net'))}"},
        "The email of {name} is {email}.",
    ),
    Shape(
        ("get_price", "price", "product_price", "lookup_price"),
        ("Get the price of a product", "Price lookup"),
        (("product", "string", ("product", "item", "article")),),
        ("what is the price of {product}?", "how much is {product}?", "price of {product}", "what does {product} cost?", "how much does {product} cost?", "get the price of {product}"),
        ("could you look up the price of {product}?",),
        lambda rng, heldout: {"product": city(rng, True).lower() if heldout else invented(rng).lower()},
        lambda rng, _: {"price": rng.randrange(1, 2000)},
        "The price of {product} is {price}.",
    ),
)
