#!/usr/bin/env python3
"""Write the generated part of the KV gate's prompt set: ``python scripts/make_kv_gate_prompts.py``.

Prompts in ``prompts.json`` whose names do not end in ``-sNN`` were written or chosen by hand and stay. The others are
made here, by seeds of their own, in the shapes and about the proportions of the former: so many that the drop's bound
can tell one point (decision 0009). The order is shuffled, so that the first N prompts are a fair part of all. With
``--check`` nothing is written, and the exit code is 1 when the file is not what this script makes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

PATH = Path(__file__).parents[1] / "src/headrace/evaluate/kv_gate/prompts.json"
VERSION = 2
SEED = 20_261_201
GENERATED = re.compile(r"-s\d\d$")

WORDS = (
    "window",
    "yellow",
    "silver",
    "forest",
    "garden",
    "candle",
    "river",
    "engine",
    "winter",
    "letter",
    "stone",
    "mountain",
    "market",
    "bottle",
    "summer",
    "bridge",
)
NAMES = (
    "Laura",
    "Daniel",
    "Robert",
    "Oliver",
    "Helen",
    "Simon",
    "Alice",
    "Emma",
    "David",
    "Peter",
    "Marta",
    "Nina",
    "Julia",
    "Felix",
    "Thomas",
    "George",
    "Sarah",
    "Clara",
    "Anna",
    "Martin",
)
JOBS = (
    "clerk",
    "smith",
    "painter",
    "judge",
    "tailor",
    "singer",
    "guard",
    "sailor",
    "cook",
    "pilot",
    "nurse",
    "dancer",
    "farmer",
    "writer",
    "teacher",
    "doctor",
    "baker",
    "driver",
    "lawyer",
    "miner",
)
CITIES = (
    "London",
    "Chicago",
    "Lisbon",
    "Madrid",
    "Miami",
    "Denver",
    "Sydney",
    "Rome",
    "Athens",
    "Berlin",
    "Prague",
    "Boston",
    "Toronto",
    "Dallas",
    "Seattle",
    "Paris",
    "Vienna",
    "Dublin",
    "Warsaw",
    "Oslo",
)
PLACES = ("harbour", "school", "library", "station", "market hall", "theatre", "town hall", "mill")
EVENTS = (
    "was painted green by {} in the spring",
    "received forty chairs from {}",
    "got a new roof, which {} paid for",
    "lent its tables to {} for the summer feast",
    "was closed for a week while {} repaired the lights",
)


def copied_list(rng: random.Random) -> str:
    words = rng.sample(WORDS, 14)
    again = "".join(f",[[ {word}]]" for word in words[1:])
    return f"List: {', '.join(words)}.\nThe same list again: {words[0]}{again}.\n"


def jobs(rng: random.Random) -> str:
    pairs = list(zip(rng.sample(NAMES, 14), rng.sample(JOBS, 14), strict=True))
    told = "".join(f"{name} is a {job}. " for name, job in pairs)
    asked = "".join(
        f"Question: What is {name}? Answer: {name} is a[[ {job}]].\n" for name, job in rng.sample(pairs, len(pairs))
    )
    return f"{told}\n{asked}"


def homes(rng: random.Random) -> str:
    pairs = list(zip(rng.sample(NAMES, 16), rng.sample(CITIES, 16), strict=True))
    told = "".join(f"{name} lives in {city}. " for name, city in pairs)
    asked = "".join(f"Where does {name} live? In[[ {city}]].\n" for name, city in rng.sample(pairs, len(pairs)))
    return f"{told}\n{asked}"


def sums(rng: random.Random) -> str:
    pairs = [(rng.randint(1, 8), rng.randint(1, 8)) for _ in range(30)]
    return "".join(f"{one} + {other} =[[ {one + other}]]\n" for one, other in pairs)


def table(rng: random.Random) -> str:
    rows = [(rng.randint(100, 999), rng.choice(WORDS)) for _ in range(30)]
    told = "".join(f"{number},{word}\n" for number, word in rows)
    asked = "".join(f"{number},[[{word}]]\n" for number, word in rows)
    return f"id,word\n{told}\nThe same table once more:\nid,word\n{asked}"


def lockers(rng: random.Random, many: int, asked: int) -> str:
    held = [(number, rng.choice(NAMES), rng.choice(WORDS)) for number in range(1, many + 1)]
    told = "".join(f"Locker {number} belongs to {name} and holds a {word}.\n" for number, name, word in held)
    again = "".join(
        f"Locker {number} belongs to[[ {name}]] and holds a[[ {word}]].\n"
        for number, name, word in rng.sample(held, asked)
    )
    return f"{told}\nOnce more, in another order.\n{again}"


def rooms(rng: random.Random) -> str:
    codes = [(number, rng.choice(WORDS), rng.choice(CITIES)) for number in range(1, 49)]
    told = "".join(
        f"The code of room {number} is {word} {city}. " + "\n" * (number % 3 == 0) for number, word, city in codes
    )
    again = "".join(f"The code of room {number} is[[ {word}]][[ {city}]]. " for number, word, city in codes)
    return f"{told}\nThe same once more.\n{again}"


def chronicle(rng: random.Random, entries: int) -> str:
    jobs_by_entry = [rng.choice(JOBS) for _ in range(entries)]
    cities = [rng.choice(CITIES) for _ in range(entries)]
    told = "".join(
        f"Entry {entry}. In this week the {rng.choice(PLACES)} {rng.choice(EVENTS).format(rng.choice(NAMES))}. A {job}"
        f" from {city} came by and left a parcel with the number {rng.randint(1000, 9999)}. \n"
        for entry, (job, city) in enumerate(zip(jobs_by_entry, cities, strict=True), start=1)
    )
    asked = "".join(
        f"Question: From where did the {jobs_by_entry[entry]} of entry {entry + 1} come? Answer: from[["
        f" {cities[entry]}]].\n"
        for entry in rng.sample(range(entries), 8)
    )
    return f"Chronicle of a small town.\n{told}\n{asked}"


KINDS: dict[str, tuple[int, Callable[[random.Random], str]]] = {
    "copy": (26, copied_list),
    "jobs": (26, jobs),
    "homes": (16, homes),
    "sums": (5, sums),
    "csv": (5, table),
    "lockers-600": (5, lambda rng: lockers(rng, 30, 24)),
    "lockers-1200": (5, lambda rng: lockers(rng, 58, 40)),
    "rooms": (5, rooms),
    "chronicle": (2, lambda rng: chronicle(rng, 24)),
}


def made(by_hand: list[dict[str, str]]) -> str:
    """The file's text."""
    generated = [
        {"name": f"{kind}-s{number:02}", "kind": "text", "text": make(random.Random(f"{SEED} {kind} {number}"))}
        for kind, (many, make) in KINDS.items()
        for number in range(many)
    ]
    prompts = sorted([*by_hand, *generated], key=lambda prompt: prompt["name"])
    random.Random(SEED).shuffle(prompts)
    return json.dumps({"version": VERSION, "prompts": prompts}, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the file is up to date")
    check: bool = parser.parse_args().check
    found = PATH.read_text(encoding="utf-8")
    text = made([prompt for prompt in json.loads(found)["prompts"] if not GENERATED.search(prompt["name"])])
    if check:
        return int(text != found)
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
