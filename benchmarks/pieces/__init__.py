"""What is measured, one file a piece: each lists its cases."""
