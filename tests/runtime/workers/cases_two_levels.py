"""Those cases of the exchanges that say most of two levels; four ranks of Gloo are slow here."""

from cases_examples import case_ncf  # noqa: F401
from cases_exchanges import (  # noqa: F401
    case_accumulation,
    case_adam,
    case_bfloat16,
    case_join,
    case_momentum,
    case_sparse_gradients,
)
