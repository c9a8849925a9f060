"""Off-policy correction: from the log-probs of three policies to a weight for each token and what is left out.

policies.py     the three policies, and which of them the ratio compares with
statistics.py   what is measured of a token's log ratio, and over what it is aggregated
weights.py      importance weights, truncated or zeroed outside bounds
rejection.py    which tokens and trajectories leave the loss
diagnostics.py  how far the policies are apart, as sums and maxima over any split of the batch
correct.py      all of it, as `OffPolicyCorrection` in asyncrl/config/corrections.py says
"""

from asyncrl.algorithms.correction.correct import Correction, correct
from asyncrl.algorithms.correction.diagnostics import Diagnostics, report
from asyncrl.algorithms.correction.policies import Policies, log_linear_proximal

__all__ = [
    "Correction",
    "Diagnostics",
    "Policies",
    "correct",
    "log_linear_proximal",
    "report",
]
