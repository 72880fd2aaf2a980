"""Names that people take for each other, though their characters differ: of Latin, Cyrillic, Greek and others.

Owns which letters of other scripts look like which Latin ones, in the case they are written in (Cyrillic `Н` looks like
`H`, `н` like no Latin letter), and what nobody sees. After Unicode's Technical Standard 39, whose full table of
confusables is not needed for names: letters of one script that are alike (`l` and `I`) are left to those who read them.
"""

from __future__ import annotations

import unicodedata

SCRIPTS = frozenset({"LATIN", "CYRILLIC", "GREEK", "COPTIC", "ARMENIAN", "CHEROKEE"})  # that share shapes of letters
PAIRS = (  # letters, and those of Latin that look like them
    ("АВЕЅІЈКМНОРСТУҮХԚԜӀѴЗ", "ABESIJKMHOPCTYYXQWIV3"),
    ("аеѕіјорсуүхԛԝһԁѵӏ", "aesijopcyyxqwhdvl"),
    ("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧͿ", "ABEZHIKMNOPTYXJ"),
    ("αγικνορυϳ", "ayikvopuj"),
    ("ՕՍՏօսհոցզ", "OUSouhngq"),
    ("ᎪᏴᏟᎠᎬᏀᎻᎫᏦᏞᎷᏢᎡᏚᎢᏙᏔᏃ", "ABCDEGHJKLMPRSTVWZ"),
    ("ıɑɡ", "iag"),
)
_LATIN = {ord(other): latin for others, latins in PAIRS for other, latin in zip(others, latins, strict=True)}
# Printable, yet without a shape: joiners, fillers, selectors of variants.
_UNSEEN = [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)]
_UNSEEN += range(0xE0100, 0xE01F0)
_SHAPES: dict[int, str | None] = {**_LATIN, **dict.fromkeys(_UNSEEN)}


def skeleton(name: str) -> str:
    """What is left of a name for a reader who knows Latin: two names that look alike have the same."""
    unseen = unicodedata.normalize("NFKD", name.translate(dict.fromkeys(_UNSEEN))).translate(_SHAPES)
    return unicodedata.normalize("NFKD", unseen.casefold())


def mixed_scripts(name: str) -> tuple[str, ...]:
    """The scripts of the first word whose letters come from several that share shapes; empty where there is none."""
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
