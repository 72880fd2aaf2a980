"""Detect names that look alike although their characters differ: in Latin, Cyrillic, Greek and other scripts.

Owns which letters of other scripts look like which Latin ones, case-sensitively (Cyrillic `Н` looks like `H`, `н` like
no Latin letter), and which characters are invisible. After Unicode's Technical Standard 39, whose full table of
confusables is not needed for names: similar letters within one script (`l` and `I`) are not treated as alike.
"""

from __future__ import annotations

import unicodedata

SCRIPTS = frozenset({"LATIN", "CYRILLIC", "GREEK", "COPTIC", "ARMENIAN", "CHEROKEE"})  # they share letter shapes
PAIRS = (  # letters, and the Latin ones that look like them
    ("АВЕЅІЈКМНОРСТУҮХԚԜӀѴЗ", "ABESIJKMHOPCTYYXQWIV3"),
    ("аеѕіјорсуүхԛԝһԁѵӏ", "aesijopcyyxqwhdvl"),
    ("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧͿ", "ABEZHIKMNOPTYXJ"),
    ("αγικνορυϳ", "ayikvopuj"),
    ("ՕՍՏօսհոցզ", "OUSouhngq"),
    ("ᎪᏴᏟᎠᎬᏀᎻᎫᏦᏞᎷᏢᎡᏚᎢᏙᏔᏃ", "ABCDEGHJKLMPRSTVWZ"),
    ("ıɑɡ", "iag"),
)
_LATIN = {ord(other): latin for others, latins in PAIRS for other, latin in zip(others, latins, strict=True)}
# Printable but invisible: joiners, fillers, variation selectors.
_UNSEEN = [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)]
_UNSEEN += range(0xE0100, 0xE01F0)
_SHAPES: dict[int, str | None] = {**_LATIN, **dict.fromkeys(_UNSEEN)}


def skeleton(name: str) -> str:
    """Return the Latin skeleton of a name: names that look alike have the same skeleton."""
    unseen = unicodedata.normalize("NFKD", name.translate(dict.fromkeys(_UNSEEN))).translate(_SHAPES)
    return unicodedata.normalize("NFKD", unseen.casefold())


def mixed_scripts(name: str) -> tuple[str, ...]:
    """Return the scripts of the first word that mixes scripts sharing letter shapes; empty if no word does."""
    found: set[str] = set()
    for each in unicodedata.normalize("NFKC", name):
        script = unicodedata.name(each, "").partition(" ")[0]
        if each.isalpha() and script in SCRIPTS:
            found.add(script)
        elif not (each.isalpha() or unicodedata.combining(each)):
            found.clear()
        if len(found) > 1:
            return tuple(sorted(found))
    return ()
