"""The advantage estimators, each in a module of its own: ``(AdvantageInputs, AlgorithmConfig) -> AdvantageOutputs``."""
