//! [`Done`]: a callback that is called exactly once.

/// Reports how a call of a tier or a source ended. If it is dropped uncalled, it reports the default, which means failure.
pub struct Done<T: Default>(Option<Box<dyn FnOnce(T) + Send>>);

impl<T: Default> Done<T> {
    /// Reports to `then`.
    pub fn new(then: impl FnOnce(T) + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    /// The call is over, with this outcome.
    pub fn call(mut self, outcome: T) {
        if let Some(then) = self.0.take() {
            then(outcome);
        }
    }
}

impl<T: Default> Drop for Done<T> {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(T::default());
        }
    }
}
