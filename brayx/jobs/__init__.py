"""A job: its YAML and options, the checks, and the parts that its training and serving share."""
