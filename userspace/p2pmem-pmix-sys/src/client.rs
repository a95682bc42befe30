// SPDX-License-Identifier: MIT OR Apache-2.0

//! The connection of a rank to PMIx's server.

use std::ffi::{c_char, c_int, CStr, CString};
use std::ptr;
use std::sync::OnceLock;
use std::time::Duration;

use libloading::Library;

use crate::abi::{self, Functions, Info, Proc};
use crate::error::{Error, Result};
use crate::request::{self, Arguments, Request, Value};

/// This process as a rank of a job that `mpirun` or `srun --mpi=pmix` started.
///
/// A process has several clients if it calls [`init`](Self::init) several times, for example because it uses MPI, too: PMIx counts them.
#[derive(Debug)]
pub struct Client {
    functions: &'static Functions,
    namespace: String,
    rank: u32,
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}

/// Returns the functions of PMIx. Loads the library at the first call, and never unloads it, because PMIx has threads.
fn functions() -> Result<&'static Functions> {
    static LOADED: OnceLock<(Library, Functions)> = OnceLock::new();
    if LOADED.get().is_none() {
        // SAFETY: loading libpmix.so.2 runs its initialization functions, which have no conditions.
        let library = unsafe { Library::new("libpmix.so.2") }.map_err(Error::NotInstalled)?;
        // SAFETY: the library is libpmix.so.2. The table and the library are stored together in a static that is never dropped. If
        // another thread stored its own first, this table is dropped with this library, and nobody has called its functions.
        let functions = unsafe { Functions::load(&library) }.map_err(Error::TooOld)?;
        // An error means that another thread has loaded the library.
        let _ = LOADED.set((library, functions));
    }
    LOADED.get().map(|loaded| &loaded.1).ok_or(Error::NoLauncher)
}

impl Functions {
    /// Returns an error unless the call succeeded.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == abi::SUCCESS {
            return Ok(());
        }
        // SAFETY: the function accepts all numbers.
        let text = unsafe { (self.error_string)(code) };
        let text = if text.is_null() {
            "unknown error".into()
        } else {
            // SAFETY: the pointer is to a string with static lifetime.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Error::Call { call, code, text })
    }
}

/// Copies a string into an array that ends with a zero byte. Omits what does not fit.
fn fill(array: &mut [c_char], text: &str) {
    let most = array.len() - 1;
    for (to, from) in array[..most].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// Returns the key for PMIx.
fn key(text: &str) -> Result<CString> {
    let bad = || Error::Key(text.into());
    if text.is_empty() || text.len() > abi::MAX_KEY {
        return Err(bad());
    }
    CString::new(text).map_err(|_| bad())
}

impl Client {
    /// Connects to PMIx's server, whose address the launcher has put into the environment.
    ///
    /// # Errors
    ///
    /// The process was not started by a launcher with PMIx, PMIx is not installed, or the server does not answer.
    pub fn init() -> Result<Self> {
        if std::env::var_os("PMIX_NAMESPACE").is_none() {
            return Err(Error::NoLauncher);
        }
        let functions = functions()?;
        let mut proc = Proc {
            namespace: [0; abi::MAX_NAMESPACE + 1],
            rank: 0,
        };
        // SAFETY: `proc` is valid for writes, and an array of no elements may be null.
        let code = unsafe { (functions.init)(&mut proc, ptr::null_mut(), 0) };
        functions.check("PMIx_Init", code)?;
        let namespace: Vec<u8> = proc
            .namespace
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| *c as u8)
            .collect();
        Ok(Self {
            functions,
            namespace: String::from_utf8_lossy(&namespace).into_owned(),
            rank: proc.rank,
        })
    }

    /// Returns the number of this rank in its job.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the name of the job.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the number of ranks of the job.
    ///
    /// # Errors
    ///
    /// The server does not answer within the limit.
    pub fn job_size(&self, limit: Duration) -> Result<u32> {
        match self.start_get(abi::RANK_WILDCARD, abi::JOB_SIZE)?.wait(limit)? {
            Value::Number(size) => Ok(size),
            other => Err(other.unexpected(abi::JOB_SIZE)),
        }
    }

    /// Stores a value for all ranks. They get it after [`commit`](Self::commit).
    ///
    /// # Errors
    ///
    /// PMIx does not accept the key, or has no memory.
    pub fn put(&self, text: &str, bytes: &[u8]) -> Result<()> {
        let key = key(text)?;
        let mut value = abi::Value {
            kind: abi::BYTE_OBJECT,
            data: abi::Data {
                bytes: abi::ByteObject {
                    bytes: bytes.as_ptr().cast_mut().cast(),
                    size: bytes.len(),
                },
            },
        };
        // SAFETY: key and value are valid for the call. PMIx copies them, and does not write to the bytes.
        let code = unsafe { (self.functions.put)(abi::GLOBAL, key.as_ptr(), &mut value) };
        self.functions.check("PMIx_Put", code)
    }

    /// Gives the stored values to the server.
    ///
    /// # Errors
    ///
    /// The connection to the server has ended.
    pub fn commit(&self) -> Result<()> {
        // SAFETY: the function has no arguments.
        let code = unsafe { (self.functions.commit)() };
        self.functions.check("PMIx_Commit", code)
    }

    /// Waits until all ranks of the job have called this function, and collects the values that they have committed.
    ///
    /// # Errors
    ///
    /// A rank did not call the function within the limit, or has ended.
    pub fn fence(&self, limit: Duration) -> Result<()> {
        let mut info = Info {
            key: [0; abi::MAX_KEY + 1],
            flags: 0,
            value: abi::Value {
                kind: abi::BOOL,
                // All bytes of the largest member are initialized, whatever PMIx copies.
                data: abi::Data { largest: [0; 3] },
            },
        };
        fill(&mut info.key, abi::COLLECT_DATA);
        info.value.data.flag = true;
        let arguments = Arguments {
            info: Some(Box::new(info)),
            ..Arguments::default()
        };
        let request = request::start(
            self.functions,
            "PMIx_Fence_nb",
            arguments,
            |functions, arguments, context| {
                let info: *const Info = arguments.info.as_deref().map_or(ptr::null(), ptr::from_ref);
                // SAFETY: no processes mean all of the namespace. `info` is valid until the callback, because the table keeps the arguments
                // until then, and the callback accepts any context.
                unsafe { (functions.fence)(ptr::null(), 0, info, 1, request::operation_done, context) }
            },
        )?;
        match request.wait(limit)? {
            Value::Nothing => Ok(()),
            other => Err(other.unexpected("a fence")),
        }
    }

    /// Returns the value that a rank has stored. Waits until the rank has committed it.
    ///
    /// # Errors
    ///
    /// The rank did not commit the value within the limit, or the value has another type.
    pub fn get(&self, rank: u32, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.request(rank, key)?.wait(limit)
    }

    /// Asks for a value that a rank has stored, without waiting for it.
    ///
    /// # Errors
    ///
    /// PMIx does not accept the key, or the connection to the server has ended.
    pub fn request(&self, rank: u32, key: &str) -> Result<Pending> {
        Ok(Pending {
            request: self.start_get(rank, key)?,
            key: key.into(),
        })
    }

    fn start_get(&self, rank: u32, text: &str) -> Result<Request> {
        let mut proc = Proc {
            namespace: [0; abi::MAX_NAMESPACE + 1],
            rank,
        };
        fill(&mut proc.namespace, &self.namespace);
        let arguments = Arguments {
            proc: Some(Box::new(proc)),
            key: Some(key(text)?),
            ..Arguments::default()
        };
        request::start(
            self.functions,
            "PMIx_Get_nb",
            arguments,
            |functions, arguments, context| {
                let proc: *const Proc = arguments.proc.as_deref().map_or(ptr::null(), ptr::from_ref);
                let key = arguments.key.as_deref().map_or(ptr::null(), CStr::as_ptr);
                // SAFETY: both pointers are valid until the callback, because the arguments are kept until then, no information may be
                // null, and the callback accepts any context.
                unsafe { (functions.get)(proc, key, ptr::null(), 0, request::value_done, context) }
            },
        )
    }
}

/// A value that a rank will have stored.
#[derive(Debug)]
pub struct Pending {
    request: Request,
    key: String,
}

impl Pending {
    /// Waits for the value.
    ///
    /// # Errors
    ///
    /// The rank did not commit the value within the limit, or the value has another type.
    pub fn wait(self, limit: Duration) -> Result<Vec<u8>> {
        match self.request.wait(limit)? {
            Value::Bytes(bytes) => Ok(bytes),
            other => Err(other.unexpected(&self.key)),
        }
    }
}

impl Drop for Client {
    /// Ends the connection to the server. PMIx waits for its server for a short time at most.
    fn drop(&mut self) {
        // SAFETY: each client is one successful PMIx_Init(), which PMIx counts. The arguments of pending requests stay valid, because
        // the table keeps them until their callbacks, forever if PMIx does not call these. An array of no elements may be null.
        unsafe { (self.functions.finalize)(ptr::null(), 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_pmix_would_misread_are_refused() {
        assert_eq!(key("p2pmem.1").unwrap().to_bytes(), b"p2pmem.1");
        assert!(key(&"x".repeat(abi::MAX_KEY)).is_ok());
        for bad in ["", "a\0b", &"x".repeat(abi::MAX_KEY + 1)] {
            assert!(matches!(key(bad), Err(Error::Key(_))), "{bad}");
        }
    }

    #[test]
    fn long_texts_end_with_a_zero() {
        let mut array = [0; 4];
        fill(&mut array, "abcdef");
        assert_eq!(array.map(|c| c as u8), *b"abc\0");
    }

    #[test]
    fn without_a_launcher_the_error_names_one() {
        // Tests do not run under a launcher with PMIx.
        assert!(std::env::var_os("PMIX_NAMESPACE").is_none());
        let text = Client::init().unwrap_err().to_string();
        assert!(text.contains("mpirun") && text.contains("srun --mpi=pmix"), "{text}");
    }

    #[test]
    fn errors_have_the_text_of_pmix() {
        let functions = match functions() {
            Ok(functions) => functions,
            Err(error) => {
                assert!(!p2pmem_header_test::in_sandbox(), "the sandbox has libpmix: {error}");
                return eprintln!("skipped: {error}");
            }
        };
        functions.check("PMIx_Put", abi::SUCCESS).unwrap();
        let text = functions.check("PMIx_Put", -46).unwrap_err().to_string();
        assert!(
            text.starts_with("PMIx_Put() failed: ") && text.contains("FOUND"),
            "{text}"
        );
        let text = functions.check("PMIx_Put", -99_999).unwrap_err().to_string();
        assert!(text.contains("PMIx error -99999"), "{text}");
    }
}
