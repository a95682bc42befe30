// SPDX-License-Identifier: MIT OR Apache-2.0

//! Copies from and to mapped memory that return an error if an access raises SIGBUS. The accesses to a buffer raise SIGBUS
//! after its provider was removed.
//!
//! The copy loops are assembler functions, so that the addresses of their instructions are known. A handler of SIGBUS
//! compares the address of the faulting instruction with these addresses. If the instruction is in a copy loop, the handler
//! continues the thread at a label that returns the error. A SIGBUS of another origin goes to the previous handler of the
//! program.
//!
//! Other processors than x86-64 have no such functions yet: the program receives SIGBUS.

use std::io;

use p2pmem_access_sys as access;

/// Copies from `from` with the accesses of [`access::read`]. Returns EFAULT if an access raised SIGBUS; `out` then has a part
/// of the bytes.
///
/// # Safety
///
/// `out.len()` bytes must be in a mapping at `from`.
pub(crate) unsafe fn read(from: *const u8, out: &mut [u8]) -> io::Result<()> {
    arch::prepare()?;
    let mut done = 0;
    while done < out.len() {
        let (width, count) = access::run(from as usize + done, out.len() - done);
        // SAFETY: `width * count` is at most the number of bytes left in the mapping and in `out`: `run()` gets that number,
        // and the caller guarantees the mapping.
        unsafe { arch::copy(from.add(done), out.as_mut_ptr().add(done), width, count, width) }?;
        done += width * count;
    }
    Ok(())
}

/// Copies to `to` with the accesses of [`access::write`]. Returns EFAULT if an access raised SIGBUS; a part may be written then.
///
/// # Safety
///
/// `data.len()` bytes must be in a mapping at `to`.
pub(crate) unsafe fn write(to: *mut u8, data: &[u8]) -> io::Result<()> {
    arch::prepare()?;
    let mut done = 0;
    while done < data.len() {
        let (width, count) = access::run(to as usize + done, data.len() - done);
        // SAFETY: `width * count` is at most the number of bytes left in `data` and in the mapping, as in read().
        unsafe { arch::copy(data.as_ptr().add(done), to.add(done), width, count, width) }?;
        done += width * count;
    }
    Ok(())
}

/// Sets `len` bytes at `to` with the accesses of [`access::fill`]. Returns EFAULT if an access raised SIGBUS.
///
/// # Safety
///
/// `len` bytes must be in a mapping at `to`.
pub(crate) unsafe fn fill(to: *mut u8, len: usize, byte: u8) -> io::Result<()> {
    arch::prepare()?;
    let pattern = [byte; 8];
    let mut done = 0;
    while done < len {
        let (width, count) = access::run(to as usize + done, len - done);
        // SAFETY: `width * count` is at most the number of bytes left in the mapping, as in read(). With a step of 0, `copy()`
        // reads only the first `width` bytes of the pattern, which has 8.
        unsafe { arch::copy(pattern.as_ptr(), to.add(done), width, count, 0) }?;
        done += width * count;
    }
    Ok(())
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::io;
    use std::mem::zeroed;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

    use libc::{c_int, c_void, sigaction, siginfo_t, ucontext_t};

    /// A function `unsafe extern "C" fn(from: *const u8, to: *mut u8, count: usize, step: usize) -> c_int`: `count` times, a
    /// load and a store of one width. `from` advances by `step`, `to` by the width. 0, or 1 after SIGBUS.
    macro_rules! copy_loop {
        ($name:literal, $register:literal, $width:literal) => {
            concat!(
                ".globl ",
                $name,
                "\n.hidden ",
                $name,
                "\n.type ",
                $name,
                ",@function\n",
                $name,
                ":\n",
                "test rdx, rdx\n",
                "jz 3f\n",
                "2: mov ",
                $register,
                ", [rdi]\n",
                "mov [rsi], ",
                $register,
                "\n",
                "add rdi, rcx\n",
                "add rsi, ",
                $width,
                "\n",
                "dec rdx\n",
                "jnz 2b\n",
                "3: xor eax, eax\n",
                "ret\n",
                ".size ",
                $name,
                ", .-",
                $name,
                "\n"
            )
        };
    }

    std::arch::global_asm!(
        ".pushsection .text.p2pmem_guarded, \"ax\", @progbits",
        ".globl p2pmem_guarded_start",
        ".hidden p2pmem_guarded_start",
        ".globl p2pmem_guarded_end",
        ".hidden p2pmem_guarded_end",
        ".globl p2pmem_guarded_fault",
        ".hidden p2pmem_guarded_fault",
        "p2pmem_guarded_start:",
        copy_loop!("p2pmem_guarded_copy8", "rax", "8"),
        copy_loop!("p2pmem_guarded_copy4", "eax", "4"),
        copy_loop!("p2pmem_guarded_copy2", "ax", "2"),
        copy_loop!("p2pmem_guarded_copy1", "al", "1"),
        "p2pmem_guarded_end:",
        "p2pmem_guarded_fault: mov eax, 1",
        "ret",
        ".popsection",
    );

    extern "C" {
        static p2pmem_guarded_start: u8;
        static p2pmem_guarded_end: u8;
        static p2pmem_guarded_fault: u8;
        fn p2pmem_guarded_copy8(from: *const u8, to: *mut u8, count: usize, step: usize) -> c_int;
        fn p2pmem_guarded_copy4(from: *const u8, to: *mut u8, count: usize, step: usize) -> c_int;
        fn p2pmem_guarded_copy2(from: *const u8, to: *mut u8, count: usize, step: usize) -> c_int;
        fn p2pmem_guarded_copy1(from: *const u8, to: *mut u8, count: usize, step: usize) -> c_int;
    }

    /// The action that the program had for SIGBUS before [`prepare`]. Never freed, as a handler may run at any time.
    static PREVIOUS: AtomicPtr<sigaction> = AtomicPtr::new(ptr::null_mut());
    /// A SIGBUS of another origin came after the last [`prepare`] that installed the handler.
    static FORWARDED: AtomicBool = AtomicBool::new(false);

    /// Copies `count` units of `width` bytes.
    ///
    /// # Safety
    ///
    /// `width` must be 8, 4, 2 or 1, and `count * width` bytes must be in a mapping at `to`, and in one at `from`; with a
    /// `step` of 0, `width` bytes at `from`.
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, width: usize, count: usize, step: usize) -> io::Result<()> {
        let copy = match width {
            8 => p2pmem_guarded_copy8,
            4 => p2pmem_guarded_copy4,
            2 => p2pmem_guarded_copy2,
            _ => p2pmem_guarded_copy1,
        };
        // SAFETY: The caller guarantees that both ranges are mapped. The functions access no other memory, and change only
        // registers that the C calling convention lets a function change. If an access faults, on_bus_error() makes the
        // function return 1.
        match unsafe { copy(from, to, count, step) } {
            0 => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        }
    }

    /// Installs the handler unless it is installed.
    pub(super) fn prepare() -> io::Result<()> {
        let own = on_bus_error as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as libc::sighandler_t;
        // SAFETY: All fields of sigaction are integers and pointers that may be 0.
        let (mut current, mut new) = unsafe { (zeroed::<sigaction>(), zeroed::<sigaction>()) };
        // SAFETY: The null pointer keeps the action as it is, and `current` is valid for writing.
        if unsafe { sigaction(libc::SIGBUS, ptr::null(), &mut current) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if current.sa_sigaction == own {
            return Ok(());
        }
        // Concurrent calls find the same action, so any copy may stay.
        PREVIOUS.store(Box::leak(Box::new(current)), Ordering::SeqCst);
        FORWARDED.store(false, Ordering::SeqCst);
        new.sa_sigaction = own;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `new` is initialised, and its handler calls only async-signal-safe functions.
        match unsafe { sigaction(libc::SIGBUS, &new, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    extern "C" fn on_bus_error(_signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        // SAFETY: With SA_SIGINFO, the kernel passes a pointer to a valid siginfo_t.
        let code = unsafe { (*info).si_code };
        // SAFETY: With SA_SIGINFO, the kernel passes a pointer to a valid ucontext_t, and nothing else accesses it while the
        // handler runs.
        let registers = unsafe { &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs };
        let at = &mut registers[libc::REG_RIP as usize];
        let (start, end) = (&raw const p2pmem_guarded_start, &raw const p2pmem_guarded_end);
        // A code above 0 is the kernel's own: the signal is a fault, and was not sent by a process.
        if code > 0 && (start as i64..end as i64).contains(at) {
            // The thread is in a copy loop, which has pushed nothing to the stack, so the label returns to its caller.
            *at = &raw const p2pmem_guarded_fault as i64;
        } else {
            forward(code);
        }
    }

    /// Puts the program's own action for SIGBUS into force. An access that faulted is repeated after the handler returns, and
    /// a signal that was sent is sent again. If that action leads back to this handler, the default action ends the process.
    fn forward(code: c_int) {
        let previous = PREVIOUS.load(Ordering::SeqCst);
        // SAFETY: All fields of sigaction are integers and pointers that may be 0, and all 0 is SIG_DFL without flags.
        let default = unsafe { zeroed::<sigaction>() };
        let next = if FORWARDED.swap(true, Ordering::SeqCst) || previous.is_null() {
            &raw const default
        } else {
            previous.cast_const()
        };
        // SAFETY: __errno_location() returns a pointer to the thread's own errno.
        let errno = unsafe { *libc::__errno_location() };
        // SAFETY: `next` points to an action that sigaction() returned and that is never freed, or to the default action.
        unsafe { sigaction(libc::SIGBUS, next, ptr::null_mut()) };
        if code <= 0 {
            // SAFETY: raise() accesses no memory of the program. The kernel delivers the signal after the handler returns.
            unsafe { libc::raise(libc::SIGBUS) };
        }
        // SAFETY: __errno_location() returns a pointer to the thread's own errno.
        unsafe { *libc::__errno_location() = errno };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use std::io;

    use p2pmem_access_sys as access;

    pub(super) fn prepare() -> io::Result<()> {
        Ok(())
    }

    /// As on x86-64, but without a guard: SIGBUS goes to the program.
    ///
    /// # Safety
    ///
    /// `width` must be 8, 4, 2 or 1, and `count * width` bytes must be mapped at `to`, and at `from`; with a `step` of 0,
    /// `width` bytes at `from`.
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, width: usize, count: usize, step: usize) -> io::Result<()> {
        for n in 0..count {
            let mut unit = [0; 8];
            // SAFETY: The caller guarantees that both ranges are mapped, and `width` is at most 8.
            unsafe {
                access::read(from.add(n * step), &mut unit[..width]);
                access::write(to.add(n * width), &unit[..width]);
            }
        }
        Ok(())
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
