// SPDX-License-Identifier: MIT OR Apache-2.0

//! Common parts of the C libraries: errors as errno and message, handles, texts, arrays.
//!
//! A C function runs its body with [`run`], which returns a negative errno after an error or a panic and stores the message
//! for [`last`]. The other functions convert arguments and results. They are `unsafe`, because only the C program knows that
//! its pointers are valid.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Failure of a call: the errno (positive), the message, and the remedy.
#[derive(Debug)]
pub struct Failure {
    /// The errno, positive.
    pub errno: i32,
    /// What failed and why.
    pub text: String,
    /// What to do about the failure, if that is known.
    pub remedy: Option<&'static str>,
}

impl Failure {
    /// A failure without a remedy.
    pub fn new(errno: i32, text: impl Into<String>) -> Self {
        Self {
            errno,
            text: text.into(),
            remedy: None,
        }
    }

    /// An invalid argument: EINVAL.
    pub fn argument(text: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, text)
    }
}

impl From<p2pmem::Error> for Failure {
    fn from(error: p2pmem::Error) -> Self {
        Self {
            errno: error.errno_or_nearest(),
            text: error.to_string(),
            remedy: error.remedy(),
        }
    }
}

thread_local! {
    /// Message and remedy of the thread's last failure.
    static LAST: RefCell<(CString, CString)> = RefCell::default();
}

/// Converts a text to a C string, which ends at the first NUL of the text.
fn c_text(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

fn keep(failure: &Failure) {
    let texts = (c_text(&failure.text), c_text(failure.remedy.unwrap_or_default()));
    // While the thread exits, the value may not exist any more. No call can read the message then.
    let _ = LAST.try_with(|last| *last.borrow_mut() = texts);
}

/// Returns the thread's last message, or its remedy if `remedy` is true. The pointer is valid until the thread's next
/// failure.
pub fn last(remedy: bool) -> *const c_char {
    LAST.try_with(|last| {
        let last = last.borrow();
        if remedy { &last.1 } else { &last.0 }.as_ptr()
    })
    .unwrap_or(c"".as_ptr())
}

/// Runs the body of a C function. Returns the number that the body returns. After an error or a panic, stores the
/// message and returns a negative errno.
pub fn run(function: &str, body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    // After a panic, at worst a handle exists that the caller did not receive.
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        Err(Failure::new(
            libc::EIO,
            format!("{function}() panicked: this is a bug of p2pmem, please report it"),
        ))
    });
    result.unwrap_or_else(|failure| {
        keep(&failure);
        -failure.errno
    })
}

/// Converts a count to the return value of a C function. A count that does not fit becomes the largest `c_int`.
pub fn count(n: usize) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

/// Converts a pointer argument to a reference. Fails for NULL.
///
/// # Safety
///
/// The pointer must be null, or valid for `'a`.
pub unsafe fn input<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::argument(format!("{what} is NULL")))
}

/// Converts the pointer of an output argument to a reference. Fails for NULL.
///
/// # Safety
///
/// The pointer must be null, or valid for writes for `'a`, and nothing else may access the value for `'a`.
pub unsafe fn output<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { pointer.as_mut() }.ok_or_else(|| Failure::argument(format!("{what} is NULL")))
}

/// Takes ownership of a handle. Returns `None` for NULL.
///
/// # Safety
///
/// The pointer must be null, or a handle that `Box::into_raw()` created, that was not released before and is not in use.
pub unsafe fn take<T>(handle: *mut T) -> Option<Box<T>> {
    // SAFETY: the caller guarantees that the handle is valid and unused; Box::into_raw() created the handle.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle) })
}

/// Converts an array argument to a slice. Fails for NULL, unless the array is empty, and for more than `most` elements.
///
/// # Safety
///
/// The pointer must be valid for `'a` for `len` elements, unless it is null.
pub unsafe fn elements<'a, T>(pointer: *const T, len: usize, most: usize, what: &str) -> Result<&'a [T], Failure> {
    if len == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(Failure::argument(format!("{what} is NULL, and has {len} elements")));
    }
    if len > most {
        return Err(Failure::argument(format!(
            "{what} has {len} elements: at most {most} are possible"
        )));
    }
    // SAFETY: the pointer is not null, so the caller guarantees that it is valid for `len` elements.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// Checks the pointer of an output array. Fails for NULL, unless the capacity is 0.
pub fn capacity<T>(pointer: *mut T, capacity: usize, what: &str) -> Result<(), Failure> {
    if capacity > 0 && pointer.is_null() {
        return Err(Failure::argument(format!("{what} is NULL, and capacity is not 0")));
    }
    Ok(())
}

/// Writes at most `capacity` values to an output array. Returns the number of all values.
///
/// # Safety
///
/// `to` must be valid for writes of `capacity` values, or null.
pub unsafe fn store_all<T>(
    values: impl IntoIterator<Item = T>,
    to: *mut T,
    capacity: usize,
    what: &str,
) -> Result<c_int, Failure> {
    self::capacity(to, capacity, what)?;
    let mut there = 0;
    for (n, value) in values.into_iter().enumerate() {
        if n < capacity {
            // SAFETY: `n` is less than `capacity`, and `to` is not null.
            unsafe { to.add(n).write(value) };
        }
        there = n + 1;
    }
    Ok(count(there))
}

/// Writes a value to an output argument, which need not be initialized. Fails for NULL.
///
/// # Safety
///
/// `to` must be null, or valid for writes.
pub unsafe fn store<T>(value: T, to: *mut T, what: &str) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::argument(format!("{what} is NULL")));
    }
    // SAFETY: the pointer is not null, so the caller guarantees that it is valid for writes.
    unsafe { to.write(value) };
    Ok(())
}

/// Converts a C string. Invalid UTF-8 is replaced. Returns `None` for NULL.
///
/// # Safety
///
/// The pointer must be null or a NUL-terminated string.
pub unsafe fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null, so it points to a NUL-terminated string.
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// Copies a text as snprintf() does, and returns its length in bytes.
///
/// # Safety
///
/// `to` must be valid for writes of `capacity` bytes, or `capacity` must be 0.
pub unsafe fn copy_text(text: &str, to: *mut c_char, capacity: usize) -> Result<c_int, Failure> {
    if capacity > 0 {
        self::capacity(to, capacity, "text")?;
        let n = text.len().min(capacity - 1);
        // SAFETY: `n + 1` bytes fit, which the caller guarantees, and the library's text does not overlap the program's
        // memory.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), n);
            to.add(n).write(0);
        }
    }
    Ok(count(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_errno_with_message() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let result = run("p2pmem_test", || panic!("on purpose"));
        std::panic::set_hook(hook);
        assert_eq!(result, -libc::EIO);
        LAST.with(|last| assert!(last.borrow().0.to_str().unwrap().contains("p2pmem_test() panicked")));
    }

    #[test]
    fn last_error_is_per_thread() {
        let fail = |text: &str| run("f", || Err(Failure::argument(text)));
        assert_eq!(fail("here"), -libc::EINVAL);
        std::thread::spawn(move || {
            LAST.with(|last| assert!(last.borrow().0.is_empty()));
            assert_eq!(fail("there\0and more"), -libc::EINVAL);
            LAST.with(|last| assert_eq!(last.borrow().0.as_c_str(), c"there"));
        })
        .join()
        .unwrap();
        LAST.with(|last| assert_eq!(last.borrow().0.as_c_str(), c"here"));
    }

    #[test]
    fn null_is_refused_unless_nothing_is_accessed() {
        let none = std::ptr::null_mut::<u32>();
        // SAFETY: the functions accept null.
        unsafe {
            assert_eq!(input(none, "port").unwrap_err().text, "port is NULL");
            assert_eq!(store(1, none, "out").unwrap_err().errno, libc::EINVAL);
            assert!(output(none, "out").is_err() && take(none).is_none() && text(std::ptr::null()).is_none());
            assert!(elements(none, 0, 4, "segments").unwrap().is_empty());
            let error = elements(none, 2, 4, "segments").unwrap_err();
            assert_eq!(error.text, "segments is NULL, and has 2 elements");
            assert_eq!(store_all([1, 2, 3], none, 0, "out").unwrap(), 3);
            assert!(store_all([1], none, 1, "out").is_err());
            assert_eq!(copy_text("text", std::ptr::null_mut(), 0).unwrap(), 4);
            assert!(copy_text("text", std::ptr::null_mut(), 1).is_err());
        }
    }

    #[test]
    fn arrays_and_texts_are_cut_to_their_capacity() {
        let (mut numbers, mut chars) = ([9_u32; 3], [1; 4]);
        // SAFETY: the arrays have the capacities.
        unsafe {
            assert_eq!(store_all([1, 2, 3], numbers.as_mut_ptr(), 2, "out").unwrap(), 3);
            assert_eq!(copy_text("abcdef", chars.as_mut_ptr(), 4).unwrap(), 6);
            assert_eq!(text(chars.as_ptr()).unwrap(), "abc");
            let error = elements(numbers.as_ptr(), 3, 2, "segments").unwrap_err();
            assert_eq!(error.text, "segments has 3 elements: at most 2 are possible");
        }
        assert_eq!(numbers, [1, 2, 9]);
    }
}
