mod agreement;
mod check;
mod exchanges;
mod requests;
mod splits;

use super::*;
use crate::boundary::Verdict;

/// A request head that must be read completely.
fn head(bytes: &[u8]) -> RequestHead {
    match RequestReader::default().read(bytes) {
        RequestStep::Head(head) => head,
        other => panic!("{other:?} for {:?}", String::from_utf8_lossy(bytes)),
    }
}

/// The head as the origin gets to see it.
fn edited(bytes: &[u8], head: &RequestHead) -> Vec<u8> {
    let mut sent = bytes[..head.len].to_vec();
    if let Some(edit) = &head.edit {
        sent.splice(edit.at.clone(), edit.with.iter().copied());
    }
    sent
}
