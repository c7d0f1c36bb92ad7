"""The losses of preferences, each in a module of its own: ``(PreferenceInputs, options) -> PreferenceLoss``."""
