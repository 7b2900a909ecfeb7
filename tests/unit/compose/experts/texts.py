"""Texts of kinds that words tell apart, and words that are in all of them."""

from weft.data.documents import Document
from weft.rng import stream

KINDS = {
    "fruit": ["apple", "pear", "plum", "cherry", "orchard", "blossom", "harvest", "cider", "juice", "basket"],
    "ships": ["anchor", "mast", "harbour", "sailor", "rudder", "keel", "deck", "voyage", "captain", "rope"],
    "stars": ["comet", "orbit", "planet", "telescope", "galaxy", "eclipse", "lunar", "meteor", "nebula", "solar"],
}
IN_ALL = ["the", "and", "with", "from", "into", "over"]


def documents(num: int, num_words: int = 60, seed: int = 0) -> list[Document]:
    """Return so many documents of each kind, by turns, named after it."""
    generator = stream(seed, "texts")
    found = []
    for number in range(num):
        for kind, words in KINDS.items():
            drawn = [*generator.choice(words, num_words), *generator.choice(IN_ALL, num_words), *IN_ALL]
            found.append(Document(f"{kind}/{number}", " ".join(generator.permutation(drawn))))
    return found


def kind_of(name: str) -> str:
    return name.split("/")[0]
