"""The corrections for tokens that another policy drew, each in a module of its own:
``(LossInputs, AlgorithmConfig) -> Tensor``, a weight of each token's loss."""
