//! How much there is in a message, before it is decoded.
//!
//! An empty message within another is two bytes when it is sent, and dozens in memory. So those that there
//! may be many of are counted first, which costs no memory at all.

use std::iter;

use prost::bytes::Buf as _;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::super::document::MEMBERS_MAX;

/// An answer, in either form: no more resources, nor names of those that are gone, than a list has members.
pub(super) fn answer(encoded: &[u8]) -> Result<(), String> {
    const RESOURCES: u32 = 2;
    const REMOVED_RESOURCES: u32 = 6;
    bounded("resources", fields(encoded, RESOURCES))?;
    bounded("removed resources", fields(encoded, REMOVED_RESOURCES))
}

/// A `ClusterLoadAssignment`: as many endpoints as a list has members at most, and as many localities.
pub(super) fn assignment(encoded: &[u8]) -> Result<(), String> {
    const ENDPOINTS: u32 = 2;
    const LB_ENDPOINTS: u32 = 2;
    let localities = || fields(encoded, ENDPOINTS);
    bounded("localities", localities())?;
    bounded("endpoints", localities().flat_map(|locality| fields(locality, LB_ENDPOINTS)))
}

fn bounded<'a>(what: &str, mut fields: impl Iterator<Item = &'a [u8]>) -> Result<(), String> {
    match fields.nth(MEMBERS_MAX) {
        Some(_) => Err(format!("more than {MEMBERS_MAX} {what}")),
        None => Ok(()),
    }
}

/// What is in each field of this number that has a length. Ends early where a message is none: that is for
/// whoever decodes it to tell.
fn fields(mut encoded: &[u8], number: u32) -> impl Iterator<Item = &[u8]> {
    iter::from_fn(move || {
        while encoded.has_remaining() {
            let (field, kind) = decode_key(&mut encoded).ok()?;
            if (field, kind) == (number, WireType::LengthDelimited) {
                let length = usize::try_from(decode_varint(&mut encoded).ok()?).ok()?;
                let (content, rest) = encoded.split_at_checked(length)?;
                encoded = rest;
                return Some(content);
            }
            skip_field(kind, field, &mut encoded, DecodeContext::default()).ok()?;
        }
        None
    })
}
