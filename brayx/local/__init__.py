"""The host of one machine: a job's doors, model, replay and learner in one process. Never imports Ray or MLflow.

`host` has the doors, `acting` the model that is learned, `buffer` and `stream` the replay, `rollouts` the environments
in Python, `learner` the thread that learns, `numbers` the metrics. `pipelines.local` joins them. `train` trains from
environments without a job.
"""
