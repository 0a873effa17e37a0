"""The meaning of words in the names of leaves: synonyms, opposites, and words that say
nothing."""

import functools as ft
import re


_words = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Of two words, whatever else is in the name.
_PHRASES = [
    (re.compile(old, re.IGNORECASE), new)
    for old, new in (
        ("(layer|rms|group|batch)_?norm(alization)?", "norm"),
        ("feed_?forward", "mlp"),
        ("enc_?dec_?att(entio)?n|encoder_att(entio)?n", "cross_attention"),
        ("conv_?transpose", "deconv"),
        ("wte(?![a-z])", "token_embedding"),
        ("wpe(?![a-z])", "position_embedding"),
        ("tok(?![a-z])", "token"),
        ("token_type", "segment"),
        ("lm_head|embed_out", "head"),
        ("res_?net_?block", "block"),
    )
]
# Words for one thing, as libraries have them.
_groups = """
    norm ln bn normalization layrnorm, linear fc dense lin, final f,
    layer layers block blocks h resblock resblocks stage stages unit units
    encoderblock decoderblock sequential features,
    embedding emb embed embedder embeddings, query q wq, key k wk, value v wv,
    output o wo out, mlp ff ffn ffw mlpblock intermediate, token word,
    position pos positional posembed positions, attention attn att attentions sa,
    conv convolution convs, downsample downsamplers downsampler,
    projection proj, vision visual image, critic critics qf, experts expert
"""
_SYNONYMS = {x: y for y, *some in map(str.split, _groups.split(",")) for x in some}
# Of each row a name has one, and what has another one is something else.
_opposites = """
    query key value output qkv, up down gate, encoder decoder, cross self,
    actor critic,
    online target, teacher student, vision text audio, pre post, before after,
    in output, input output, ih hh, mean var, std mean, std mu, mu nu,
    token position segment patch cls, norm linear conv deconv, forward backward,
    attention mlp, generator discriminator
"""
_OPPOSITES = [set(row.split()) for row in _opposites.split(",")]
# What a layer is, and not which of them.
KINDS = set("norm linear conv deconv".split())
# Where a norm is: after the one part is before the next.
ORDER = set("pre post input before after".split())
# Of the layer whose weight is often that of the embedding of tokens.
HEADS = set("head output decoder logits unembedding unembed lm cls predictions".split())
# Whose leaves are copies of those of a model.
COPIES = set("opt optim optimizer optimiser mu nu momentum ema average".split())
# What names hold only because something has to be there.
_EMPTY = set(
    "model models module modules net network params state dict inner wrapped base "
    "c to the weight w kernel param parameter parameters d".split()
)


@ft.lru_cache(2**16)
def words(text: str) -> tuple[str, ...]:
    """The words of a name, as this module has them, without those that say nothing."""
    for pattern, new in _PHRASES:
        text = pattern.sub(lambda m, new=new: f"_{new}_", text)
    some = (_SYNONYMS.get(x, x) for x in map(str.lower, _words.findall(text)))
    return tuple(x for x in some if x not in _EMPTY and x != "layer")


def are_opposites(some: set[str], others: set[str]) -> bool:
    """Whether names with these words, which the other lacks, are of other things."""
    return any(
        a != b for row in _OPPOSITES for a in some & row for b in others & row
    ) or bool((some ^ others) & ORDER)
