"""The host of one machine: a job's doors, model, replay and learner in one process. Never imports Ray or MLflow.

`host` has the doors, `acting` the models that act, `buffer` and `stream` the replay, `rollouts` the environments in
Python, `learner` the learner's thread, `numbers` the metrics. `brayx.local.job` joins them. `train` trains from
environments without a job.
"""
