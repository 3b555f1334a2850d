"""The former path of `brayx.jobs.models`; works for one release."""

import warnings

from brayx.jobs.models import build_model as build_model

warnings.warn("module pipelines.models is brayx.jobs.models now", FutureWarning, stacklevel=2)
