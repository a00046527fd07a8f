"""Texts of random words. Most vocabularies have each of these words as one token, also after a space."""

from __future__ import annotations

import random

COMMON_WORDS = """
about after again air all also animal answer area back because before between black boat body book build call car change
children city close cold come country day door down draw earth east end enough example eye face family far father feel field
find fire fish follow food form four game girl give gold good green group hand hard head help high home house idea island keep
kind land language large last learn left letter life light line list live look machine make map mark mean minute money moon
morning mother mountain move music name near never night north number ocean open order other page paper part people place plan
plant play point power problem question quick rain read real right river road rock room rule school science second sentence
ship short side simple small snow song sound south space star state step story street study sun surface system table talk test
thing think thousand time town travel tree true turn under unit voice walk warm water week wheel white wind winter wood word
work world write year yellow young
"""
WORDS = COMMON_WORDS.split()


def random_text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_words))
