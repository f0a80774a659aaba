//! Access to the fields of a hook's context.
//!
//! The verifier knows only whole fields at constant offsets from the context's pointer. Plain
//! reads do not stay that way: the compiler merges those of two branches into one that computes
//! the address first. So each access is one instruction that it cannot take apart.

/// Reads a 32-bit field of a context: `load_u32!(ctx: bpf_sock_ops, local_ip6, 3)` is the last
/// word of the array `local_ip6`.
macro_rules! load_u32 {
    ($context:ident : $type:ty, $($field:ident).+ $(, $index:literal)?) => {{
        let context: *mut $type = $context;
        let value: u64;
        // SAFETY: reads within the context that the kernel handed to the program.
        unsafe {
            core::arch::asm!(
                "{value} = *(u32 *)({context} + {offset})",
                value = lateout(reg) value,
                context = in(reg) context,
                offset = const core::mem::offset_of!($type, $($field).+) $(+ 4 * $index)?,
                options(readonly, nostack, preserves_flags),
            );
        }
        value as u32
    }};
}

/// Reads the field of a context that is a pointer to something of the kernel's.
macro_rules! load_pointer {
    ($context:ident : $type:ty, $($field:ident).+) => {{
        let context: *mut $type = $context;
        let value;
        // SAFETY: reads within the context that the kernel handed to the program.
        unsafe {
            core::arch::asm!(
                "{value} = *(u64 *)({context} + {offset})",
                value = lateout(reg) value,
                context = in(reg) context,
                offset = const core::mem::offset_of!($type, $($field).+),
                options(readonly, nostack, preserves_flags),
            );
        }
        value
    }};
}

/// Writes a 32-bit field of a context.
macro_rules! store_u32 {
    ($context:ident : $type:ty, $field:ident $([$index:literal])? = $value:expr) => {{
        let context: *mut $type = $context;
        let value: u64 = u32::into($value);
        // SAFETY: writes within the context that the kernel handed to the program.
        unsafe {
            core::arch::asm!(
                "*(u32 *)({context} + {offset}) = {value}",
                value = in(reg) value,
                context = in(reg) context,
                offset = const core::mem::offset_of!($type, $field) $(+ 4 * $index)?,
                options(nostack, preserves_flags),
            );
        }
    }};
}

pub(crate) use {load_pointer, load_u32, store_u32};
