"""The same programs written with statemesh, by hand, and with other libraries, timed side by side."""
