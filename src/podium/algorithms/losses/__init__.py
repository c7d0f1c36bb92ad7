"""The losses of policies and critics, each in a module of its own: ``(LossInputs, AlgorithmConfig) -> TokenLoss``."""
