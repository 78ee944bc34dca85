"""JAX's own test files, run with statemesh's functions in the place of JAX's."""
