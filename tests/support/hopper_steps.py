"""Which steps of hopper do what others do, for tests that need not run all of them."""

from flash_helpers.registry.hopper import HOPPER

*_, LAST_OF_HOPPER = HOPPER.steps.values()
# Steps after the first that takes any lengths, but for the last: without a mask they compute whole
# blocks alike.
GENERAL_STEPS = {
    step
    for step in HOPPER.steps.values()
    if HOPPER.steps["h19"].number < step.number < LAST_OF_HOPPER.number
}
