"""Advantage estimators, one file each: ``(AdvantageInputs, AlgorithmConfig) -> AdvantageOutputs``."""
