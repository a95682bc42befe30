// SPDX-License-Identifier: MIT OR Apache-2.0

//! Calls of PMIx that end with a callback, and waits for them that have a limit.
//!
//! PMIx gets a number as the context of a callback, not a pointer. The callback looks the number up in a table, which owns the arguments
//! of the call. So a callback that comes after the limit, or twice, uses no memory that is gone.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void, CString};
use std::fmt;
use std::mem;
use std::ptr;
use std::slice;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, SendError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::abi::{self, Functions, Info, Proc};
use crate::error::{Error, Result};

/// What a call gave.
#[derive(Debug)]
pub(crate) enum Value {
    Nothing,
    Number(u32),
    Bytes(Vec<u8>),
    /// A value of another type, with its `pmix_data_type_t`.
    Other(u16),
}

impl Value {
    /// Returns the error if the value is not what the caller expects.
    pub(crate) fn unexpected(&self, key: &str) -> Error {
        let kind = match self {
            Self::Nothing => 0,
            Self::Number(_) => abi::UINT32,
            Self::Bytes(_) => abi::BYTE_OBJECT,
            Self::Other(kind) => *kind,
        };
        Error::Type { key: key.into(), kind }
    }
}

/// The arguments of a call, which PMIx may use until the callback.
#[derive(Default)]
pub(crate) struct Arguments {
    pub(crate) proc: Option<Box<Proc>>,
    pub(crate) key: Option<CString>,
    pub(crate) info: Option<Box<Info>>,
}

// SAFETY: the only pointers in the fields are in the value of `info`, which this crate sets to a bool only. So moving the arguments to
// another thread moves plain data.
unsafe impl Send for Arguments {}
// SAFETY: as above; the fields have no interior mutability.
unsafe impl Sync for Arguments {}

/// The end of a call: its status, what it gave, and its arguments.
type End = (c_int, Value, Arc<Arguments>);

struct Entry {
    arguments: Arc<Arguments>,
    end: Sender<End>,
}

/// The pending calls, by the contexts of their callbacks.
struct Table {
    last: usize,
    entries: BTreeMap<usize, Entry>,
}

static TABLE: Mutex<Table> = Mutex::new(Table {
    last: 0,
    entries: BTreeMap::new(),
});

fn lock() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pending call.
pub(crate) struct Request {
    functions: &'static Functions,
    call: &'static str,
    end: Receiver<End>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("call", &self.call)
            .finish_non_exhaustive()
    }
}

/// Starts a call. `start` calls PMIx with pointers into the arguments, which are valid until the callback, and with the context.
pub(crate) fn start(
    functions: &'static Functions,
    call: &'static str,
    arguments: Arguments,
    start: impl FnOnce(&Functions, &Arguments, *mut c_void) -> c_int,
) -> Result<Request> {
    let (sender, end) = channel();
    let arguments = Arc::new(arguments);
    let id = {
        let mut table = lock();
        table.last += 1;
        let id = table.last;
        let entry = Entry {
            arguments: arguments.clone(),
            end: sender,
        };
        table.entries.insert(id, entry);
        id
    };
    // The entry is there first, because the callback may come before the call returns, also on this thread.
    let code = start(functions, &arguments, ptr::without_provenance_mut(id));
    if code == abi::OPERATION_SUCCEEDED {
        finish(id, abi::SUCCESS, Value::Nothing);
    } else if code != abi::SUCCESS {
        // The callback of a call that failed does not come.
        lock().entries.remove(&id);
        functions.check(call, code)?;
    }
    Ok(Request { functions, call, end })
}

impl Request {
    /// Waits for the callback.
    pub(crate) fn wait(self, limit: Duration) -> Result<Value> {
        let call = self.call;
        match self.end.recv_timeout(limit) {
            Ok((code, value, _)) => self.functions.check(call, code).map(|()| value),
            // The table keeps the arguments until the callback.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(Error::Timeout { call, limit }),
        }
    }
}

/// Ends a call, if it is pending.
fn finish(id: usize, code: c_int, value: Value) {
    let Some(entry) = lock().entries.remove(&id) else {
        return;
    };
    if let Err(SendError((_, _, arguments))) = entry.end.send((code, value, entry.arguments)) {
        // Nobody waits. PMIx may use the arguments until its callback returns, which is later than this point: a few hundred bytes
        // stay allocated.
        mem::forget(arguments);
    }
}

/// The callback of a call that gives nothing.
pub(crate) unsafe extern "C" fn operation_done(code: c_int, context: *mut c_void) {
    finish(context.addr(), code, Value::Nothing);
}

/// The callback of a call that gives a value.
///
/// # Safety
///
/// `value` is null, or valid during the call.
pub(crate) unsafe extern "C" fn value_done(code: c_int, value: *mut abi::Value, context: *mut c_void) {
    let value = if code == abi::SUCCESS && !value.is_null() {
        // SAFETY: PMIx's value is valid until the callback returns.
        copy(unsafe { &*value })
    } else {
        Value::Nothing
    };
    finish(context.addr(), code, value);
}

/// Copies a value of PMIx.
fn copy(value: &abi::Value) -> Value {
    match value.kind {
        // SAFETY: the type says that this member of the union is set.
        abi::UINT32 => Value::Number(unsafe { value.data.uint32 }),
        abi::BYTE_OBJECT => {
            // SAFETY: the type says that this member of the union is set.
            let object = unsafe { value.data.bytes };
            if object.bytes.is_null() || object.size == 0 {
                return Value::Bytes(Vec::new());
            }
            // SAFETY: PMIx's object has `size` bytes at this pointer, which belong to the value.
            Value::Bytes(unsafe { slice::from_raw_parts(object.bytes.cast(), object.size) }.to_vec())
        }
        kind => Value::Other(kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts a call into the table.
    fn begin() -> (usize, Receiver<End>) {
        let (sender, end) = channel();
        let mut table = lock();
        table.last += 1;
        let id = table.last;
        let entry = Entry {
            arguments: Arc::default(),
            end: sender,
        };
        table.entries.insert(id, entry);
        (id, end)
    }

    #[test]
    fn late_repeated_and_unknown_callbacks_do_no_harm() {
        let call = |id: usize| {
            // SAFETY: the value is null.
            unsafe { value_done(0, ptr::null_mut(), ptr::without_provenance_mut(id)) };
            // SAFETY: any context is possible.
            unsafe { operation_done(0, ptr::without_provenance_mut(id)) };
        };
        let (id, end) = begin();
        call(id);
        assert!(matches!(end.try_recv(), Ok((0, Value::Nothing, _))));
        assert!(end.try_recv().is_err());
        let (id, end) = begin();
        drop(end);
        call(id);
        call(usize::MAX);
        assert!(!lock().entries.contains_key(&id));
    }

    #[test]
    fn values_are_copied() {
        let mut bytes = *b"abc";
        let mut value = abi::Value {
            kind: abi::BYTE_OBJECT,
            data: abi::Data {
                bytes: abi::ByteObject {
                    bytes: bytes.as_mut_ptr().cast(),
                    size: 3,
                },
            },
        };
        assert!(matches!(copy(&value), Value::Bytes(bytes) if bytes == b"abc"));
        value.data.bytes.bytes = ptr::null_mut();
        assert!(matches!(copy(&value), Value::Bytes(bytes) if bytes.is_empty()));
        value.kind = abi::UINT32;
        value.data.uint32 = 77;
        assert!(matches!(copy(&value), Value::Number(77)));
        value.kind = abi::BOOL;
        assert!(matches!(copy(&value), Value::Other(abi::BOOL)));
        assert!(copy(&value).unexpected("k").to_string().contains("type 1"));
    }
}
