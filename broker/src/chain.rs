//! An error and its causes as one line.

use std::error::Error;

/// What an error says, and what its causes add to that. Libraries differ in whether an error's text has
/// that of its cause in it; nothing is said twice.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut said: Vec<String> = Vec::new();
    let mut next: Option<&dyn Error> = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        match said.last_mut() {
            Some(last) if last.ends_with(&text) => {}
            Some(last) if text.starts_with(&*last) => *last = text,
            _ => said.push(text),
        }
        next = error.source();
    }
    said.join(": ")
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn nothing_is_said_twice() {
        for (texts, said) in [
            (&["refused"][..], "refused"),
            (&["refused", "cannot connect"], "cannot connect: refused"),
            (&["refused", "connect: refused", "a.test"], "a.test: connect: refused"),
            (&["refused", "refused", "refused"], "refused"),
            (&["transport error: refused", "transport error"], "transport error: refused"),
            (&["a: b", "c: a: b", "d: c: a: b"], "d: c: a: b"),
        ] {
            let (first, outer) = texts.split_first().unwrap();
            let error = outer.iter().fold(anyhow!("{first}"), |error, text| error.context(*text));
            assert_eq!(chain(error.as_ref()), said);
        }
    }
}
