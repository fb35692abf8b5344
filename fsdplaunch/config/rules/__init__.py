"""What keys may not say together: one small function per rule."""
