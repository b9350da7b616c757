"""What the low-rank correction of a matrix goes by (LoRA, Hu et al. 2022)."""


def low_rank_names(matrix: str) -> tuple[str, str]:
    """The names of the pair a, b that corrects a matrix W to W + b·a.

    >>> low_rank_names("blocks.07.mlp.hidden.weight")
    ('blocks.07.mlp.hidden.lora_a', 'blocks.07.mlp.hidden.lora_b')
    """
    stem = matrix.removesuffix("weight")
    return f"{stem}lora_a", f"{stem}lora_b"
