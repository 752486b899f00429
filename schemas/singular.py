"""Turn the plurals of a sentence template into singulars where the number is 1."""

import re

_NOUNS = {
    f"{noun}s": noun
    for noun in (
        "byte", "character", "column", "file", "group", "layer", "logprob", "pair", "prompt", "response", "row",
        "sequence", "step", "tensor", "token", "turn", "value", "version",
    )
} | {"prefixes": "prefix", "passes": "pass", "entries": "entry"}  # fmt: skip
_VERBS = {"have": "has", "are": "is", "were": "was", "do": "does"} | {
    verb: f"{verb}s" for verb in ("begin", "contain", "count", "differ", "get", "lack", "repeat", "violate")
}
_LONE = re.compile(
    r"(?<![^\s(])(?P<before>(?:in|of|for|over|at|across|step|version) )?1 (?P<of>of [\d,]+ )?(?P<adjective>(?:more|\w+ed|\w+able) )?"
    rf"(?P<noun>{'|'.join(_NOUNS)})\b(?P<what> of [a-z_]+)?(?: (?P<verb>{'|'.join(_VERBS)})\b)?"
)


def singular(text: str) -> str:
    """Put nouns counted by a lone 1, and their verbs, in the singular.

    >>> singular("1 rows have no reward; 1 of 3,344 tokens differ, in 1 sequences; at step 1 rows are short")
    '1 row has no reward; 1 of 3,344 tokens differs, in 1 sequence; at step 1 rows are short'
    """
    return _LONE.sub(_in_singular, text)


def _in_singular(found: re.Match[str]) -> str:
    before, of, adjective, what = (found[name] or "" for name in ("before", "of", "adjective", "what"))
    if before in ("step ", "version "):
        return found[0]
    noun, verb = found["noun"], found["verb"]
    verb = "" if verb is None else f" {verb if before else _VERBS[verb]}"
    return f"{before}1 {of}{adjective}{noun if of else _NOUNS[noun]}{what}{verb}"
