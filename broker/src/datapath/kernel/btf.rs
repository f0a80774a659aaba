//! Looks up where the running kernel keeps a member of one of its structures.
//!
//! aya reads the same type information, but keeps it to itself, and its relocations need a
//! compiler that emits them; this needs one number.

/// Where the kernel describes its types.
pub(super) const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;

/// The offset of a direct member of a structure, in bytes. `None` if the data does not tell it.
pub(super) fn member_offset(btf: &[u8], structure: &str, member: &str) -> Option<u32> {
    if u16::from_ne_bytes(*btf.first_chunk()?) != MAGIC {
        return None;
    }
    let [header_len, type_off, type_len, str_off, str_len] = words(btf.get(4..)?)?;
    let section = |offset: u32, len: u32| {
        let start = (header_len as usize).checked_add(offset as usize)?;
        btf.get(start..)?.get(..len as usize)
    };
    let strings = section(str_off, str_len)?;
    let mut types = section(type_off, type_len)?;

    while !types.is_empty() {
        let [name, info, _size] = words(types)?;
        let (kind, count, has_bitfields) = ((info >> 24) & 0x1f, info & 0xffff, info >> 31 == 1);
        let details = types.get(12..)?;
        if kind == KIND_STRUCT && name_is(strings, name, structure) {
            for i in 0..count as usize {
                let [name, _type, offset] = words(details.get(12 * i..)?)?;
                if name_is(strings, name, member) {
                    let bits = if has_bitfields { offset & 0x00ff_ffff } else { offset };
                    return Some(bits / 8);
                }
            }
            return None;
        }
        types = details.get(details_len(kind, count as usize)?..)?;
    }
    None
}

/// How many bytes follow the three words that every type begins with. `None` for kinds younger
/// than this program: what follows them cannot be found.
fn details_len(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, sections, 64-bit enumerations.
        4 | 5 | 15 | 19 => 12 * count,
        // Enumerations, function prototypes.
        6 | 13 => 8 * count,
        // Pointers, forward declarations, typedefs, qualifiers, functions, floats, type tags.
        2 | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

/// The first words of a slice.
fn words<const N: usize>(bytes: &[u8]) -> Option<[u32; N]> {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.get(..4 * N)?.as_chunks().0) {
        *word = u32::from_ne_bytes(*bytes);
    }
    Some(words)
}

/// Whether the zero-terminated string at an offset is this one.
fn name_is(strings: &[u8], offset: u32, name: &str) -> bool {
    strings
        .get(offset as usize..)
        .and_then(|rest| rest.strip_prefix(name.as_bytes()))
        .is_some_and(|rest| rest.first() == Some(&0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `int`, `struct other { int y; }`, `struct sock { int x; int y; }`.
    fn sample(bitfields: bool) -> Vec<u8> {
        let strings = b"\0int\0other\0sock\0x\0y\0";
        let at = |name: &str| {
            let needle = format!("\0{name}\0");
            let found = strings.windows(needle.len()).position(|w| w == needle.as_bytes());
            u32::try_from(found.unwrap() + 1).unwrap()
        };
        let flag = u32::from(bitfields) << 31;
        let types = [
            vec![at("int"), 1 << 24, 4, 32],
            vec![at("other"), KIND_STRUCT << 24 | 1, 4, at("y"), 1, 0],
            vec![
                at("sock"),
                KIND_STRUCT << 24 | 2 | flag,
                8,
                at("x"),
                1,
                0,
                at("y"),
                1,
                32 | u32::from(bitfields) << 29,
            ],
        ]
        .concat();
        let types_len = u32::try_from(4 * types.len()).unwrap();
        let mut btf = MAGIC.to_ne_bytes().to_vec();
        btf.extend([1, 0]);
        for word in [24, 0, types_len, types_len, u32::try_from(strings.len()).unwrap()]
            .into_iter()
            .chain(types)
        {
            btf.extend(word.to_ne_bytes());
        }
        btf.extend(strings);
        btf
    }

    #[test]
    fn members_are_found_in_their_structure() {
        for bitfields in [false, true] {
            let btf = sample(bitfields);
            assert_eq!(member_offset(&btf, "sock", "x"), Some(0));
            assert_eq!(member_offset(&btf, "sock", "y"), Some(4));
            assert_eq!(member_offset(&btf, "other", "y"), Some(0));
            assert_eq!(member_offset(&btf, "sock", "z"), None);
            assert_eq!(member_offset(&btf, "so", "x"), None);
        }
    }

    #[test]
    fn damaged_data_tells_nothing() {
        let btf = sample(false);
        for len in 0..btf.len() - 3 {
            assert_eq!(member_offset(&btf[..len], "sock", "y"), None, "{len}");
        }
        for i in 0..btf.len() {
            let mut damaged = btf.clone();
            damaged[i] ^= 0xff;
            // Whatever it answers, it must end and not panic.
            let _ = member_offset(&damaged, "sock", "y");
        }
    }
}
