//! The real kernel programs, loaded with aya.
