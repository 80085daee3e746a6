"""Live recorders for other people's tools: TensorBoard, MLflow, Weights & Biases (extra ``track``).

A tracker is told the numbers of every round as it ends (:func:`fedalloy.experiment.records.scalars.scalars`). What a
run needs to be resumed and reported is in its own folder all the same: a tracker that fails is left out with a warning,
and the run goes on. The libraries are loaded when a tracker is made. Others register theirs with
``@register("tracker", "name")`` (:class:`fedalloy.experiment.tracking.Tracker`).
"""
