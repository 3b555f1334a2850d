"""The host of one machine: a job's doors, model, replay and learner in one process. Never imports Ray or MLflow.

`host` has the doors, `acting` the model that is learned, `buffer` and `stream` the replay, `learner` the thread that
learns, `numbers` the metrics. Who starts a job puts them together.
"""
