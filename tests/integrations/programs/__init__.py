"""Programs as users write them: nothing in them knows of zeropage. The tests start them, or import their parts."""
