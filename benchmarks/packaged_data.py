"""The data set of the quickstart: prompts for boilerplate code, answered by SmolLM2-135M-Instruct.

    python -m benchmarks.packaged_data prompts.jsonl
    python -m flows.rebucket quickstart --param 'data.files=["prompts.jsonl"]' --param data.limit=null \
        --param regenerate.enabled=true --param regenerate.max_new_tokens=128 \
        --param regenerate.batch_size=128 --param target.compute_dtype=bfloat16
    cp runs/store/regenerate/*/prompts.jsonl dflash_core/data/packaged/smollm2-boilerplate.jsonl

Takes some minutes on two cores with bfloat16 units. A drafter learns such text within minutes, and prompts it
has not seen are of the same kind: what a short training on two cores can show. Prompts are in random order,
so that any leading part holds all kinds. A processor with other units may answer some prompts differently.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

KINDS = {
    "class": "Write a Python class for {noun} with the attributes {fields}.",
    "sql": "Write an SQL statement that creates a table for {noun} with the columns {fields}.",
    "form": "Write an HTML form for {noun} with the fields {fields}.",
}
# Nouns with an article, separated by commas, and the fields that fit them.
DOMAINS = {
    (
        "a product, an order, an invoice, a customer, a supplier, a shopping cart, a coupon, a discount, "
        "a warehouse, a shipment, a refund, a gift card, a receipt, a catalog, a price list"
    ): "name price quantity total date address category weight code status",
    (
        "an employee, a meeting, a project, a task, a contract, a department, a company, an office, a "
        "printer, a report, a presentation, a job application, a business trip, a work shift"
    ): "title date start end owner budget location status priority description",
    (
        "a student, a teacher, a course, a lesson, an exam, a grade, a classroom, a school bus, a "
        "homework, a library card, a textbook, a university, a scholarship, a school trip"
    ): "name subject teacher grade year room points date level duration",
    (
        "a book, an author, a magazine, a newspaper, an article, a poem, a library, a bookshop, a "
        "publisher, a review, a comic, a dictionary"
    ): "title author year pages language genre isbn price publisher rating",
    (
        "a flight, a hotel, a hotel room, a train, a bus, a ticket, a passport, a suitcase, an airport, "
        "an airline, a cruise, a tour, a map, a campsite"
    ): "number origin destination date price seats duration country owner rating",
    (
        "a patient, a doctor, a nurse, a hospital, an appointment, a prescription, a medicine, a vaccine, "
        "a blood test, an allergy, a diet, a workout, a gym"
    ): "name age date dose duration weight doctor room result notes",
    (
        "a recipe, an ingredient, a restaurant, a menu, a dish, a cake, a pizza, a sandwich, a coffee, a "
        "cocktail, a cheese, a wine, a refrigerator, an oven"
    ): "name price calories size temperature ingredients rating time servings origin",
    (
        "a house, an apartment, a room, a window, a door, a lamp, a sofa, a table, a bed, a garden, a "
        "garage, a kitchen, an alarm clock, a washing machine"
    ): "color width height price rooms area year brand power owner",
    (
        "a car, a bicycle, a motorcycle, a truck, a boat, a ship, an airplane, a helicopter, a taxi, an "
        "ambulance, a tractor, a scooter, a parking lot, a gas station"
    ): "brand model year speed color price weight owner fuel seats",
    (
        "a dog, a cat, a horse, a bird, a fish, a tree, a flower, a mountain, a river, a lake, an island, "
        "a forest, a planet, a star, a galaxy"
    ): "name age height weight color location length depth species mass",
    (
        "a song, an album, a playlist, a concert, a singer, a band, a movie, an actor, a television show, "
        "a podcast, a video game, a photo, a painting, a museum"
    ): "title artist year duration genre rating price language size location",
    (
        "a user, a password, a file, a folder, a website, a web page, an email, a message, a database, a "
        "server, a computer, a laptop, a phone, a printer queue, a backup"
    ): "name size date owner type address version status path id",
    (
        "a player, a team, a match, a stadium, a coach, a referee, a tournament, a league, a race, a "
        "marathon, a score, a trophy, a chess game"
    ): "name country date points goals age location duration captain rank",
    (
        "a bank account, a credit card, a loan, a payment, a salary, a tax, a budget, a stock, a bond, an "
        "insurance, a wallet, a currency, a donation, an auction"
    ): "number owner balance amount date rate currency limit status bank",
    (
        "a city, a street, a bridge, a park, a museum ticket, a mayor, an election, a court case, a "
        "police report, a fire station, a post office, a letter, a parcel, a weather report"
    ): "name country date number length population address status year sender",
}
FIELDS_PER_PROMPT = 3


def prompts() -> list[tuple[str, str]]:
    """Return kind and text of each prompt, in a random order that is always the same."""
    generator = random.Random(0)
    found: dict[str, str] = {}
    for nouns, fields in DOMAINS.items():
        for noun in nouns.split(", "):
            for kind, text in KINDS.items():
                *first, last = generator.sample(fields.split(), FIELDS_PER_PROMPT)
                found[text.format(noun=noun, fields=f"{', '.join(first)} and {last}")] = kind
    rows = [(kind, text) for text, kind in found.items()]
    generator.shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="JSONL file of prompts to write")
    rows = [
        {"id": number, "kind": kind, "messages": [{"role": "user", "content": text}]}
        for number, (kind, text) in enumerate(prompts())
    ]
    args = parser.parse_args()
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{args.out}: {len(rows)} prompts of the kinds {', '.join(KINDS)}")


if __name__ == "__main__":
    main()
