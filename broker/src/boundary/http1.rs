//! HTTP/1.x framing.
