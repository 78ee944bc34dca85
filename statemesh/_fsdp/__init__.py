"""Parameters that are split over a data axis, and made whole inside the mapped call."""
