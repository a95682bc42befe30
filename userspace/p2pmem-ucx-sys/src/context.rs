// SPDX-License-Identifier: MIT OR Apache-2.0

//! UCX with a choice of devices and transports.

use std::ffi::CString;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::{Handle, Params, Zeroed, FEATURE_RMA, FEATURE_WAKEUP, PARAM_FEATURES};
use crate::functions::{Functions, VERSION};
use crate::{Result, UcxError};

/// Options of a [`Context`]. They take precedence over the environment's variables `UCX_*`.
#[derive(Clone, Debug)]
pub struct Options {
    settings: Vec<(&'static str, String)>,
}

impl Options {
    /// UCX uses only the network devices `devices`, such as `mlx5_0:1`, and only the transports `transports`, such as `rc`.
    /// So UCX cannot fall back to TCP or another NIC.
    pub fn new(devices: &str, transports: &str) -> Self {
        Self {
            settings: vec![
                ("NET_DEVICES", devices.to_owned()),
                ("TLS", transports.to_owned()),
                // The program registers its memory itself, so UCX need not watch the process's mappings.
                ("RCACHE_ENABLE", "n".to_owned()),
            ],
        }
    }

    /// The processor copies no message, not even a short one, unless the environment has `UCX_ZCOPY_THRESH`: UCX passes each
    /// one to the NIC.
    #[must_use]
    pub fn without_copies(mut self) -> Self {
        if std::env::var_os("UCX_ZCOPY_THRESH").is_none() {
            self.settings.push(("ZCOPY_THRESH", "0".to_owned()));
        }
        self
    }
}

/// UCX with a choice of devices and transports. Clones are the same context.
#[derive(Clone)]
pub struct Context {
    pub(crate) inner: Arc<ContextInner>,
}

/// # Invariants
///
/// `raw` is a context of UCX until this is dropped. Every call of UCX on the context, or on an object that was created from it,
/// holds `lock`.
pub(crate) struct ContextInner {
    pub(crate) functions: &'static Functions,
    pub(crate) raw: Handle,
    lock: Mutex<()>,
}

// SAFETY: UCX lets any thread use a context and its objects, one thread at a time (UCS_THREAD_MODE_SERIALIZED), and the lock
// of the invariant sees to that.
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({:?})", self.inner.raw)
    }
}

impl Context {
    /// Creates a context. The first one loads UCX.
    ///
    /// # Errors
    ///
    /// UCX is not installed or too old, or it does not have the devices or transports.
    pub fn new(options: &Options) -> Result<Self> {
        let functions = Functions::get()?;
        let config = Config::read(functions)?;
        for (name, value) in &options.settings {
            config.set(name, value)?;
        }
        let params = Params {
            field_mask: PARAM_FEATURES,
            features: FEATURE_RMA | FEATURE_WAKEUP,
            ..Params::zeroed()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the parameters and the configuration are valid, and `raw` is valid for a handle. UCX keeps neither.
        let status = unsafe { (functions.init)(VERSION.0, VERSION.1, &params, config.raw, &mut raw) };
        functions.check("ucp_init", status)?;
        // INVARIANT: created above; all other code of the crate calls UCX by `ContextInner::call`.
        Ok(Self {
            inner: Arc::new(ContextInner {
                functions,
                raw,
                lock: Mutex::new(()),
            }),
        })
    }
}

impl ContextInner {
    /// Calls UCX. The callback of an endpoint's error may run meanwhile.
    pub(crate) fn call<T>(&self, call: impl FnOnce(&Functions) -> T) -> T {
        let _held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        call(self.functions)
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: a context by the invariant. All objects that were created from it keep it alive, so none is left.
        self.call(|functions| unsafe { (functions.cleanup)(self.raw) });
    }
}

/// A configuration of UCX: that of the environment, and changes.
struct Config {
    functions: &'static Functions,
    raw: Handle,
}

impl Config {
    fn read(functions: &'static Functions) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: null pointers select the prefix UCX_ and no file, and `raw` is valid for a handle.
        let status = unsafe { (functions.read_config)(ptr::null(), ptr::null(), &mut raw) };
        functions.check("ucp_config_read", status)?;
        Ok(Self { functions, raw })
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let text = |text: &str| CString::new(text).map_err(|_| UcxError::Name(text.to_owned()));
        let (name, value) = (text(name)?, text(value)?);
        // SAFETY: the configuration is valid until this is dropped, and UCX copies the strings.
        let status = unsafe { (self.functions.modify_config)(self.raw, name.as_ptr(), value.as_ptr()) };
        self.functions.check("ucp_config_modify", status)
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: read by ucp_config_read(), and not used after this.
        unsafe { (self.functions.release_config)(self.raw) };
    }
}
