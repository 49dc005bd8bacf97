"""Values that the model must copy: names, cities, numbers. Held-out values never occur in training.

Real names alone would be learned by keepalive, so most training values are invented from syllables; numbers and layer
ranges are split by a residue.
"""

# fmt: off
# ruff: noqa: E501, SIM905
from __future__ import annotations

import random

CITIES = tuple(
    "Paris|London|Rome|Madrid|Vienna|Prague|Warsaw|Lisbon|Dublin|Athens|Oslo|Helsinki|Brussels|Budapest|Hamburg|Munich|Cologne|Leipzig|Milan|Naples|Turin|Venice|Lyon|Nice|Lille|Porto|Seville|Valencia|Bilbao|Geneva|Basel|Bern|"
    "Zagreb|Belgrade|Sofia|Bucharest|Riga|Vilnius|Kyiv|Odessa|Istanbul|Ankara|Cairo|Tunis|Algiers|Rabat|Lagos|Accra|Nairobi|Kampala|Dakar|Harare|Durban|Cape Town|Johannesburg|Dubai|Doha|Tehran|Baghdad|Amman|Beirut|Delhi|Mumbai|"
    "Kolkata|Chennai|Karachi|Lahore|Dhaka|Kathmandu|Bangkok|Hanoi|Manila|Jakarta|Singapore|Kuala Lumpur|Beijing|Shanghai|Shenzhen|Hong Kong|Taipei|Seoul|Busan|Tokyo|Osaka|Kyoto|Sapporo|Sydney|Perth|Brisbane|Adelaide|Auckland|"
    "New York|Boston|Chicago|Denver|Seattle|Portland|Dallas|Houston|Austin|Miami|Atlanta|Detroit|Phoenix|San Diego|Los Angeles|San Francisco|Las Vegas|Toronto|Montreal|Ottawa|Calgary|Mexico City|Havana|Bogota|Lima|Quito|Santiago|"
    "Caracas|Buenos Aires|Sao Paulo|Salvador|Brasilia|Cordoba|Berlin|Stuttgart|Dresden|Bonn|Kiel|Graz|Linz|Utrecht|Ghent|Aarhus|Malmo|Bergen|Turku|Tampere|Krakow|Gdansk|Brno|Leeds|Bristol|Cardiff|Glasgow|Belfast|Cork".split("|")
)
HELDOUT_CITIES = tuple(
    "Zurich|Stockholm|Copenhagen|Amsterdam|Barcelona|Florence|Marseille|Frankfurt|Edinburgh|Manchester|Reykjavik|Tallinn|Casablanca|Melbourne|Vancouver|Philadelphia|Montevideo|Nagoya|Bangalore|Bratislava|Salzburg|Rotterdam".split(
        "|"
    )
)

PEOPLE = tuple(
    "Anna|Ben|Clara|David|Emma|Felix|Grace|Henry|Ida|Jack|Kate|Leo|Maria|Noah|Olivia|Paul|Quinn|Rosa|Sam|Tom|Uma|Victor|Wendy|Xavier|Yara|Zoe|Alice|Bob|Carol|Dan|Eve|Frank|Gina|Hugo|Ivan|Jane|Karl|Lisa|Mark|Nina|Otto|Peter|Rita|"
    "Steve|Tina|Ulf|Vera|Will|Yusuf|Ali|Fatima|Mohammed|Chen|Wei|Yuki|Hiro|Raj|Priya|Carlos|Lucia|Pedro|Sofia|Igor|Olga|Sven|Lars|Pierre|Marie|Luca|Giulia|Jan|Eva|Max|Mia|Tim|Lea|Amir|Sara|John|Mary|James|Robert|Linda|Susan".split("|")
)
HELDOUT_PEOPLE = tuple(
    "Greta|Oscar|Matilda|Benedikt|Konrad|Ingrid|Dmitri|Aisha|Kenji|Rosalind|Thaddeus|Penelope|Barnaby|Svetlana|Mahmoud|Ximena|Bartholomew|Jolanda".split(
        "|"
    )
)

_STARTS = "b br c ch d dr f fr g gr h j k kl l m n p pr qu r s sh st str t th tr v w z".split()
_VOWELS = "a e i o u ai ea ee ia ie io oa ou y".split()
_ENDS = ["", "", "n", "r", "l", "s", "t", "m", "nd", "rt", "ck", "x", "ng", "lf"]


def invented(rng: random.Random) -> str:
    """A pronounceable word of one to four syllables."""
    return "".join(
        rng.choice(_STARTS) + rng.choice(_VOWELS) + rng.choice(_ENDS)
        for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4)))
    ).capitalize()


def _cased(value: str, rng: random.Random) -> str:
    return value.lower() if rng.random() < 0.2 else value


def city(rng: random.Random, heldout: bool = False) -> str:
    if heldout:
        return rng.choice(HELDOUT_CITIES)
    name = rng.choice(CITIES) if rng.random() < 0.35 else invented(rng)
    while name in HELDOUT_CITIES:
        name = invented(rng)
    if rng.random() < 0.06:
        name = f"{name} {invented(rng)}"
    return _cased(name, rng)


def person(rng: random.Random, heldout: bool = False) -> str:
    if heldout:
        return rng.choice(HELDOUT_PEOPLE)
    name = rng.choice(PEOPLE) if rng.random() < 0.35 else invented(rng)
    while name in HELDOUT_PEOPLE:
        name = invented(rng)
    return _cased(name, rng)


def number(rng: random.Random, heldout: bool = False) -> int:
    """Up to five digits; held out are the numbers above 9 that leave 3 when divided by 17."""
    while True:
        value = rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 4, 5)))
        if (value > 9 and value % 17 == 3) == heldout:
            return value


def layer_range(rng: random.Random, heldout: bool = False) -> tuple[int, int]:
    """A half-open range below 100; held out are the pairs with (7 start + end) % 11 == 5."""
    while True:
        start = rng.choice((0, rng.randrange(12), rng.randrange(80)))
        end = start + rng.randrange(1, 20)
        if ((7 * start + end) % 11 == 5) == heldout:
            return start, end
