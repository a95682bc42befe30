// SPDX-License-Identifier: MIT OR Apache-2.0

//! Requests, from the arguments of `alloc()`, `alloc_stripe()` and `explain()`.

use p2pmem::{Request, Strategy};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::convert::{clients, path_class, provider, Int};

/// The arguments of a request.
pub(crate) struct RequestArguments<'a, 'py> {
    pub(crate) size: Int<u64>,
    pub(crate) near: Option<&'a Bound<'py, PyAny>>,
    pub(crate) align: Option<Int<u64>>,
    pub(crate) strategy: &'a str,
    pub(crate) provider: Option<&'a Bound<'py, PyAny>>,
    pub(crate) prefer: Option<&'a Bound<'py, PyAny>>,
    pub(crate) max_class: Option<&'a Bound<'py, PyAny>>,
    /// The number of parts of a stripe, 0 for as many as possible; none for one buffer.
    pub(crate) parts: Option<Int<u32>>,
}

impl RequestArguments<'_, '_> {
    pub(crate) fn request(&self) -> PyResult<Request> {
        let bad = |why: String| Err(PyValueError::new_err(why));
        let strategy = match (self.strategy, self.parts) {
            ("nearest", None) => Strategy::Nearest,
            ("upstream", None) => Strategy::Upstream,
            ("spread", None) => Strategy::Spread,
            ("pack", None) => Strategy::Pack,
            ("nearest", Some(_)) => Strategy::Stripe,
            (other, Some(_)) => return bad(format!("parts with the strategy {other:?}: a stripe has no strategy")),
            (other, None) => {
                return bad(format!(
                    "{other:?} is no strategy: use one of nearest, upstream, spread, pack"
                ))
            }
        };
        let mut request = Request::new(self.size.0)
            .strategy(strategy)
            .near(clients(self.near)?)
            .align(self.align.unwrap_or_default().0)
            .parts(self.parts.unwrap_or_default().0);
        match (self.provider, self.prefer) {
            (Some(_), Some(_)) => return bad("a provider is required or preferred, not both".into()),
            (Some(id), None) => request = request.provider(provider(id)?),
            (None, Some(id)) => request = request.prefer(provider(id)?),
            (None, None) => {}
        }
        if let Some(class) = self.max_class {
            request = request.max_class(path_class(class)?);
        }
        Ok(request)
    }
}
