"""A model as one flat vector: where its tensors lie, and walks over it that move each byte once."""
