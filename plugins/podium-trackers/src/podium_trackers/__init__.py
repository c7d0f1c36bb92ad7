"""TensorBoard, Weights & Biases and Trackio as trackers of runs."""

from podium_trackers.sinks import TensorBoardSink, TrackerSink, TrackioSink, WandbSink

__all__ = ["TensorBoardSink", "TrackerSink", "TrackioSink", "WandbSink"]
