"""Machine code for readers: listings, reports, pages."""
