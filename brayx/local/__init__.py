"""The host of one machine: a job's model, replay and learner in one process. Never imports Ray or MLflow.

`buffer` and `stream` have the replay, `rollouts` the environments in Python, `learner` the learner's thread, and
`learner_process` its process if it has one; `trainee` joins them, and `job` trains with them. `serving` serves a job.
`train` trains from environments without a job.
"""
