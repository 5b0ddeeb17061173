"""Recipes: which format each weight of a model is stored in."""

from dataclasses import dataclass

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
    """Formats (names in FORMATS) of the projections and experts, and of the vocabulary matrices."""

    name: str
    matrices: str
    vocabulary: str

    def format_of(self, block: str, weight: str) -> str:
        """Name of the format of a block's weight; "f32" for what is kept in float."""
        if weight in _MATRICES.get(block, ()):
            return self.matrices
        if weight in _VOCABULARY.get(block, ()):
            return self.vocabulary
        return "f32"


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", matrices="f32", vocabulary="f32"),
        Recipe("q8", matrices="q8", vocabulary="q8"),
        Recipe("q4", matrices="q4", vocabulary="q8"),
    )
}
