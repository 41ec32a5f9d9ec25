"""Those cases of factors that say most of two levels, which this file's job has."""

from cases_factors import (  # noqa: F401
    case_coded_factors_bit_for_bit,
    case_coded_factors_of_uneven_batches,
    case_factors_bit_for_bit,
    case_factors_of_accumulated_passes,
    case_factors_of_uneven_batches,
    case_factors_under_autocast,
    case_factors_while_some_have_joined,
)
