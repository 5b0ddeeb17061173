"""Recipes: which format each weight is stored in, and how finely its inputs are rounded.

int16 activations (two int8 planes) compute what the stored weights say, and decode as fast as int8:
memory is what it waits for. int8 reads a prompt 1.5 times as fast, but a rounded input can turn a
router to another expert. A cache of 8 bits halves the memory of a context, and the time it takes.
"""

from dataclasses import dataclass

from emberd.compile.quantize.activations import Precision

# Weights that are read whole for every token, by block. What no table names stays f32: norms,
# router, convolution, and the small projections that steer the recurrence and the shared expert.
_MATRICES = {
    "gated_delta": {"in_proj_qkv", "in_proj_z", "out_proj"},
    "gated_attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "moe": {
        "experts_gate_up",
        "experts_down",
        "shared_gate_proj",
        "shared_up_proj",
        "shared_down_proj",
    },
}
_VOCABULARY = {"embed": {"embedding"}, "head": {"lm_head"}}


@dataclass(frozen=True)
class Recipe:
    """Formats (names in FORMATS) of the projections and experts, and of the vocabulary matrices.

    `activations`: what these are multiplied with. `cache_dtype`: of the attention's keys and
    values, float32, int16 or int8.
    """

    name: str
    matrices: str
    vocabulary: str
    activations: Precision
    cache_dtype: str

    def format_of(self, block: str, weight: str) -> str:
        """Name of the format of a block's weight; "f32" for what is kept in float."""
        if weight in _MATRICES.get(block, ()):
            return self.matrices
        if weight in _VOCABULARY.get(block, ()):
            return self.vocabulary
        return "f32"

    def activations_of(self, block: str, weight: str) -> Precision:
        """What a block's weight is multiplied with."""
        return "float32" if self.format_of(block, weight) == "f32" else self.activations


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", "f32", "f32", activations="float32", cache_dtype="float32"),
        Recipe("q8", "q8", "q8", activations="int16", cache_dtype="int16"),
        Recipe("q4", "q4", "q8", activations="int16", cache_dtype="int16"),
        Recipe("q4kv8", "q4", "q8", activations="int16", cache_dtype="int8"),
        Recipe("q4a8", "q4", "q8", activations="int8", cache_dtype="int16"),
    )
}
