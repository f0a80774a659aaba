//! Reads kernel structures, at offsets that the loader has looked up in the type information.
//!
//! Where an offset is not known the helper must not even be called: a kernel in lockdown refuses
//! programs that could.
//!
//! Programs may not compute with such pointers, so one is put on the stack and read back
//! as a number. The helper checks every address it reads from.

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::bindings::{__sk_buff, bpf_sock};
use aya_ebpf::helpers::generated::bpf_probe_read_kernel;
use broker_ebpf::abi::UNKNOWN_OFFSET;

use crate::maps::{OFFSETS, SK_ERR_OFFSET};

/// The error that is pending on a socket.
#[inline(always)]
pub fn sk_err(sk: *mut bpf_sock) -> Option<i32> {
    of_socket::<i32>(sk, SK_ERR_OFFSET.load())
}

/// The flags of the file that a socket belongs to.
#[inline(always)]
pub fn file_flags(sk: *mut bpf_sock) -> Option<u32> {
    let offsets = OFFSETS.load();
    let socket = of_socket::<u64>(sk, offsets.sock_socket)?;
    let file = member::<u64>(socket, offsets.socket_file)?;
    member::<u32>(file, offsets.file_flags)
}

/// Whether the application has ended its side of the connection, and still listens.
#[inline(always)]
pub fn is_half_closed(sk: *mut bpf_sock) -> Option<bool> {
    /// `SEND_SHUTDOWN` of the kernel; closing a socket sets `RCV_SHUTDOWN`, too.
    const SEND_SHUTDOWN: u8 = 2;
    Some(of_socket::<u8>(sk, OFFSETS.load().sock_shutdown)? == SEND_SHUTDOWN)
}

/// Whether the application has read all that was redirected to the socket at this address.
#[inline(always)]
pub fn has_read_redirected(sk: u64) -> Option<bool> {
    /// The kernel keeps flags in the pointer's lowest bits.
    const FLAGS: u64 = 7;
    let offsets = OFFSETS.load();
    if offsets.psock_ingress_skb == UNKNOWN_OFFSET || offsets.psock_ingress_msg == UNKNOWN_OFFSET {
        return None;
    }
    let psock = member::<u64>(sk, offsets.sock_user_data)? & !FLAGS;
    if psock == 0 {
        // Out of the map; nothing was redirected to it since.
        return Some(true);
    }
    // Not taken over by the worker thread of the kernel yet.
    let queue = psock + u64::from(offsets.psock_ingress_skb);
    let queued = member::<u32>(queue, offsets.skb_head_qlen)?;
    // Taken over, and not read yet: a list that ends at its own head if it is empty.
    let list = psock + u64::from(offsets.psock_ingress_msg);
    let first = member::<u64>(list, 0)?;
    Some(queued == 0 && first == list)
}

/// Whether exactly so many bytes were sent and received over the network, and the application has
/// read them.
#[inline(always)]
pub fn has_exchanged(sk: *mut bpf_sock, sent: u32, first_seq: u32, received: u64) -> Option<bool> {
    let offsets = OFFSETS.load();
    let unread =
        of_socket::<u32>(sk, offsets.tcp_rcv_nxt)? != of_socket::<u32>(sk, offsets.tcp_copied_seq)?;
    let bytes_received = of_socket::<u64>(sk, offsets.tcp_bytes_received)?;
    let bytes_sent = write_seq(sk)?.wrapping_sub(first_seq);
    Some(!unread && bytes_received == received && bytes_sent == sent)
}

/// The sequence number of the next byte that the application sends.
#[inline(always)]
pub fn write_seq(sk: *mut bpf_sock) -> Option<u32> {
    of_socket::<u32>(sk, OFFSETS.load().tcp_write_seq)
}

/// The sequence number after the last urgent byte that was sent; without one, that of the first byte
/// that is not acknowledged.
#[inline(always)]
pub fn urgent_until(sk: *mut bpf_sock) -> Option<u32> {
    of_socket::<u32>(sk, OFFSETS.load().tcp_snd_up)
}

/// The sequence number of a received segment's first byte.
#[inline(always)]
pub fn segment_seq(skb: *mut __sk_buff) -> Option<u32> {
    noted_by_tcp(skb, OFFSETS.load().skb_cb_seq)
}

/// The sequence number of the first byte that the sender of a received segment did not have then.
#[inline(always)]
pub fn segment_ack_seq(skb: *mut __sk_buff) -> Option<u32> {
    noted_by_tcp(skb, OFFSETS.load().skb_cb_ack_seq)
}

/// Whether a received segment has urgent data.
#[inline(always)]
pub fn is_urgent(skb: *mut __sk_buff) -> bool {
    const URG: u8 = 0x20;
    noted_by_tcp(skb, OFFSETS.load().skb_cb_flags).is_none_or(|flags: u8| flags & URG != 0)
}

/// The sequence number of the first byte that was received for nobody yet.
#[inline(always)]
pub fn copied_seq(sk: *mut bpf_sock) -> Option<u32> {
    of_socket::<u32>(sk, OFFSETS.load().tcp_copied_seq)
}

/// What TCP has noted of a received segment.
#[inline(always)]
fn noted_by_tcp<T: Copy + Default>(skb: *mut __sk_buff, offset: u32) -> Option<T> {
    let notes = OFFSETS.load().skb_cb;
    if notes == UNKNOWN_OFFSET || offset == UNKNOWN_OFFSET {
        return None;
    }
    member(address(skb)?, notes + offset)
}

/// A member of the socket itself.
#[inline(always)]
fn of_socket<T: Copy + Default>(sk: *mut bpf_sock, offset: u32) -> Option<T> {
    if offset == UNKNOWN_OFFSET {
        return None;
    }
    member(address(sk)?, offset)
}

/// Where the kernel keeps a socket, for [`has_read_redirected`].
#[inline(always)]
pub fn kept_at(sk: *mut bpf_sock) -> Option<u64> {
    if OFFSETS.load().sock_user_data == UNKNOWN_OFFSET {
        return None;
    }
    address(sk)
}

#[inline(always)]
fn address<T>(structure: *mut T) -> Option<u64> {
    let mut address = 0_u64;
    // SAFETY: both ends are pointer-sized variables on the stack.
    let failed = unsafe {
        bpf_probe_read_kernel((&raw mut address).cast(), 8, (&raw const structure).cast::<c_void>())
    };
    (failed == 0 && address != 0).then_some(address)
}

/// A member of the structure at an address.
#[inline(always)]
fn member<T: Copy + Default>(structure: u64, offset: u32) -> Option<T> {
    if offset == UNKNOWN_OFFSET || structure == 0 {
        return None;
    }
    let from = ptr::without_provenance::<c_void>((structure + u64::from(offset)) as usize);
    let mut value = T::default();
    // SAFETY: the helper checks the address that it reads from; the target is on the stack.
    let failed =
        unsafe { bpf_probe_read_kernel((&raw mut value).cast(), size_of::<T>() as u32, from) };
    (failed == 0).then_some(value)
}
