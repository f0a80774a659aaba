//! Opaque bytes.
