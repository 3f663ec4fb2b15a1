# SPDX-License-Identifier: Apache-2.0
"""A small parallel corpus that is made by rule: English sentences and what they are in German.

For tests and first runs of what reads two languages. The sentences depend on nothing but their number.
"""

from __future__ import annotations

import random

PHRASES_ID = "phrases"
LANGUAGES = ("en", "de")

_ARTICLES = {"m": "der", "f": "die", "n": "das"}
# English singular and plural; German gender, singular and plural.
_NOUNS = (
    ("dog", "dogs", "m", "Hund", "Hunde"),
    ("cat", "cats", "f", "Katze", "Katzen"),
    ("horse", "horses", "n", "Pferd", "Pferde"),
    ("bird", "birds", "m", "Vogel", "Vögel"),
    ("child", "children", "n", "Kind", "Kinder"),
    ("woman", "women", "f", "Frau", "Frauen"),
    ("man", "men", "m", "Mann", "Männer"),
    ("house", "houses", "n", "Haus", "Häuser"),
    ("car", "cars", "n", "Auto", "Autos"),
    ("book", "books", "n", "Buch", "Bücher"),
    ("tree", "trees", "m", "Baum", "Bäume"),
    ("flower", "flowers", "f", "Blume", "Blumen"),
    ("ship", "ships", "n", "Schiff", "Schiffe"),
    ("table", "tables", "m", "Tisch", "Tische"),
    ("lamp", "lamps", "f", "Lampe", "Lampen"),
    ("apple", "apples", "m", "Apfel", "Äpfel"),
    ("letter", "letters", "m", "Brief", "Briefe"),
    ("bridge", "bridges", "f", "Brücke", "Brücken"),
    ("stone", "stones", "m", "Stein", "Steine"),
    ("picture", "pictures", "n", "Bild", "Bilder"),
)
_ADJECTIVES = (
    ("old", "alte"),
    ("young", "junge"),
    ("small", "kleine"),
    ("large", "große"),
    ("red", "rote"),
    ("green", "grüne"),
    ("white", "weiße"),
    ("black", "schwarze"),
    ("heavy", "schwere"),
    ("beautiful", "schöne"),
    ("new", "neue"),
    ("quiet", "stille"),
)
_VERBS = (
    ("sees", "sieht"),
    ("finds", "findet"),
    ("carries", "trägt"),
    ("seeks", "sucht"),
    ("has", "hat"),
    ("knows", "kennt"),
    ("shows", "zeigt"),
    ("loses", "verliert"),
    ("draws", "zeichnet"),
    ("needs", "braucht"),
)
_NUMBERS = (
    ("two", "zwei"),
    ("three", "drei"),
    ("four", "vier"),
    ("five", "fünf"),
    ("six", "sechs"),
    ("seven", "sieben"),
    ("eight", "acht"),
    ("nine", "neun"),
    ("ten", "zehn"),
    ("many", "viele"),
)
_PLACES = (
    ("in the garden", "im Garten"),
    ("in the city", "in der Stadt"),
    ("on the street", "auf der Straße"),
    ("at the river", "am Fluss"),
    ("behind the wall", "hinter der Mauer"),
    ("in the forest", "im Wald"),
    ("under the roof", "unter dem Dach"),
    ("at the station", "am Bahnhof"),
)
_TIMES = (
    ("today", "heute"),
    ("in the morning", "am Morgen"),
    ("in the evening", "am Abend"),
    ("in winter", "im Winter"),
    ("in summer", "im Sommer"),
    ("now", "jetzt"),
)


def phrase_pairs(count: int = 6000, seed: int = 0) -> list[tuple[str, str]]:
    """(English, German) of `count` different sentences, such as ("the old dog sees three red houses in the garden
    today .", "der alte Hund sieht heute im Garten drei rote Häuser .")."""
    draw = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        who, what = draw.sample(_NOUNS, 2)
        own, its = draw.choice(_ADJECTIVES), draw.choice(_ADJECTIVES)
        verb, number = draw.choice(_VERBS), draw.choice(_NUMBERS)
        place, time = draw.choice(_PLACES), draw.choice(_TIMES)
        english = f"the {own[0]} {who[0]} {verb[0]} {number[0]} {its[0]} {what[1]} {place[0]} {time[0]} ."
        article = _ARTICLES[who[2]]
        german = f"{article} {own[1]} {who[3]} {verb[1]} {time[1]} {place[1]} {number[1]} {its[1]} {what[4]} ."
        found.setdefault(english, german)
    return list(found.items())
